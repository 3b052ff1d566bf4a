"""The page of an autograd report: the fix, the reason, the lines and the code; for a loss, the modules that it reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, capitalised, listed, plural, share
from torchdebug_magics.html.page import Box, Boxes, Code, Facts, Fold, Note, Page, Table
from torchdebug_magics.instruments.autograd.module_boxes import module_boxes
from torchdebug_magics.instruments.autograd.report import AutogradReport, GraphReport

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.autograd.module_boxes import ModuleBox
    from torchdebug_magics.instruments.autograd.report import Cut, Finding, LiveAutograd
    from torchdebug_magics.report import Location

__all__ = ["live_page", "page"]

_FEW_NAMES = 3

_CUTS = {
    "detach": "`detach`", "no_grad": "disabled gradients", "lift_fresh": "a copy into a new tensor",
    "_local_scalar_dense": "a copy into Python numbers", "_to_copy": "a cast to integers or bools",
}  # fmt: skip


def page(report: AutogradReport | GraphReport) -> Page:
    """The page of a cell, or of one loss."""
    return _of_loss(report) if isinstance(report, GraphReport) else _of_cell(report)


def live_page(snapshot: LiveAutograd) -> Page:
    """While the cell runs."""
    how = "recording" if snapshot.is_recording else "watching"
    steps = f"{plural(snapshot.backward_count, 'backward pass', 'es')}, {plural(snapshot.steps_count, 'optimizer step')}"
    return Page("autograd", "busy", f"{how.capitalize()}: {steps}")


def _of_cell(report: AutogradReport) -> Page:
    blocks: list[Block] = [] if report.finding is None else _finding(report.finding)
    blocks += [Note(problem, "warn") for problem in report.problems]
    blocks += [Fold(f"Also: {finding.title()}", tuple(_finding(finding))) for finding in report.findings[1:]]
    status: Status = "good" if report.finding is None else "warn" if report.finding.is_hint else "bad"
    status = "info" if status == "good" and (report.raised or not report.backward_count) else status
    return Page("autograd", status, capitalised(report.title), tuple(blocks))


def _finding(finding: Finding) -> list[Block]:
    """The fix, the reason and the other lines concerned; then the code."""
    rows = (
        ("fix", finding.fix),
        ("why", finding.explanation),
        ("saved" if finding.writer_op else "op", _at(finding.saved_at)),
        ("first backward", _at(finding.first_backward_at)),
        ("shared part", _at(finding.shared_from)),
        ("gradient error", share(finding.error_ratio) if finding.error_ratio is not None else ""),
        ("parameters", listed(finding.parameters) if len(finding.parameters) > 1 else ""),
        ("module", finding.module or ""),
    )
    blocks: list[Block] = [Facts(tuple((name, text) for name, text in rows if text))]
    if finding.excerpt:
        blocks.append(Code(finding.excerpt, finding.location.line if finding.location is not None else None))
    if len(finding.parameters) > _FEW_NAMES:
        blocks.append(Fold(f"Parameters: all {len(finding.parameters)} names", (Facts((("parameters", ", ".join(finding.parameters)),)),)))
    return blocks


def _at(where: Location | None) -> str:
    if where is None:
        return ""
    return f"{where}: `{where.source}`" if where.source else str(where)


def _of_loss(report: GraphReport) -> Page:
    blocks: list[Block] = []
    drawn = module_boxes(report)
    missed = [one.name for one in report.reaches if not one.reached and not one.is_frozen]
    if report.finding is not None:
        blocks += _finding(report.finding)
    elif missed:
        blocks.append(Facts((("not reached", listed(missed)),)))
    if drawn:
        blocks.append(_picture(report, drawn))
    blocks += [Note(problem, "warn") for problem in report.problems]
    if report.cuts and not drawn:
        rows = [(one.op, one.module, _at(one.location)) for one in report.cuts]
        table = Table("Lines that cut the graph", ("op", "module", "line"), rows, {"line": "code"})
        blocks.append(Fold(f"Lines that cut the graph: {len(rows)}", (table,)) if report.finding is not None else table)
    if report.reaches:
        table = _parameters(report)
        blocks.append(Fold(f"Parameters: {plural(len(table.rows), 'row')}", (table,)) if drawn else table)
    status: Status = "bad" if report.found else "warn" if missed else "good" if report.reaches else "info"
    return Page("autograd", status, capitalised(report.title), tuple(blocks))


def _parameters(report: GraphReport) -> Table:
    rows = [
        (one.name, "reached" if one.reached else "frozen" if one.is_frozen else "not reached", one.path_length, one.grad_norm)
        for one in report.reaches
    ]
    marked = frozenset(place for place, one in enumerate(report.reaches) if not one.reached and not one.is_frozen)
    formats = {"nodes to the loss": "count", "gradient norm": "number"}
    return Table("Parameters", ("parameter", "state", "nodes to the loss", "gradient norm"), rows, formats, marked)  # type: ignore[arg-type]


def _picture(report: GraphReport, drawn: tuple[ModuleBox, ...]) -> Block:
    """From the input at the top to the loss at the bottom."""
    whole = f"{plural(report.nodes_count, 'graph node')}, {byte_size(report.saved_bytes)} saved for backward"
    boxes = [Box(one.path or "before the first parameter", _box_text(one), _box_status(one), tuple(map(_cut, one.cuts))) for one in drawn]
    return Boxes("Modules that the gradient of the loss reaches, from input to loss", (*boxes, Box("loss", whole, "info")))


def _box_status(box: ModuleBox) -> Status:
    if box.missed_count:
        return "warn" if box.reached_count else "bad"
    return "good" if box.reached_count else "info"


def _box_text(box: ModuleBox) -> str:
    trainable = box.reached_count + box.missed_count
    parts = [f"{box.reached_count} of {plural(trainable, 'parameter')} reached" if box.reached_count else ""]
    parts += [f"not reached: {plural(trainable, 'parameter')}" if box.missed_count and not box.reached_count else ""]
    parts += [f"{plural(box.frozen_count, 'parameter')} frozen" if box.frozen_count else ""]
    parts += [f"{byte_size(box.saved_bytes)} saved for backward" if box.saved_bytes else ""]
    return ", ".join(filter(None, parts))


def _cut(cut: Cut) -> str:
    return f"cut by {_CUTS.get(cut.op, f'`{cut.op}`, which has no derivative')} · {_at(cut.location)}"
