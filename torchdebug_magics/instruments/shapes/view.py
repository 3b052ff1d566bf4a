"""What a shapes report shows: the verdict, why it broke and the fixes, the table, the totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, count, shape
from torchdebug_magics.html.page import Facts, Fold, Note, Page, Table

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Cell
    from torchdebug_magics.instruments.shapes.report import Failure, Row, ShapesReport

__all__ = ["page"]

_COLUMNS: dict[str, Format] = {
    "module": "text",
    "type": "text",
    "call": "count",
    "input": "text",
    "output": "text",
    "dtype": "text",
    "params": "count",
    "FLOPs": "count",
    "activations": "bytes",
    "note": "text",
}


def page(report: ShapesReport) -> Page:
    """The whole report."""
    blocks: list[Block] = []
    if report.failure is not None:
        blocks += _failure(report.failure)
    blocks += [Note(problem, "warn") for problem in report.problems]
    blocks += [_table(report), Facts(tuple(_totals(report)))]
    if report.uncounted_ops:
        blocks.append(Fold("ops whose arithmetic is not counted", (Facts((("not counted", ", ".join(report.uncounted_ops)),)),)))
    return Page("shapes", "bad" if report.failure else "good", report.verdict, tuple(blocks))


def _failure(failure: Failure) -> list[Block]:
    rows = [("error", failure.error)]
    rows += [("fix, tried" if fix.verified else "fix, not tried", f"`{fix.code}`  {fix.why}".rstrip()) for fix in failure.fixes]
    return [Facts(tuple(rows))]


def _table(report: ShapesReport) -> Table:
    rows = [_cells(row) for row in report.rows]
    return Table("every module call, in its order", tuple(_COLUMNS), rows, _COLUMNS)


def _cells(row: Row) -> tuple[Cell, ...]:
    name = f"{'  ' * row.depth}{row.path.rpartition('.')[2] or '(root)'}"
    return (
        name,
        row.type,
        row.call,
        ", ".join(map(shape, row.input_shapes)),
        ", ".join(map(shape, row.output_shapes)),
        row.dtype,
        row.own_params,
        row.flops,
        row.activation_bytes,
        row.note,
    )


def _totals(report: ShapesReport) -> list[tuple[str, str]]:
    return [
        ("parameters", f"{report.total_params:,} ({byte_size(report.param_bytes)}), {report.trainable_params:,} trainable"),
        ("FLOPs", count(report.total_flops)),
        ("activations", f"{byte_size(report.activation_bytes)} saved for backward"),
        ("run", report.mode),
    ]
