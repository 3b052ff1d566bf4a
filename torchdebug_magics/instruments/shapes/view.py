"""What a shapes report shows: the verdict; where it broke and what to change; the table; what it takes to train."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchdebug_magics.format import plural
from torchdebug_magics.html.page import Bars, Code, Facts, Fold, Measure, Note, Page, Place, Table
from torchdebug_magics.instruments.shapes.table.columns import COLUMNS, chosen, common_kind, full_name, shapes, whole
from torchdebug_magics.instruments.shapes.table.largest_parts import largest_parts, sizes
from torchdebug_magics.instruments.shapes.table.outline import outline, walk
from torchdebug_magics.instruments.shapes.table.totals import legend, totals_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Block, Cell, Status
    from torchdebug_magics.instruments.shapes.report import Failure, Fix, Need, ShapesReport, Step
    from torchdebug_magics.instruments.shapes.table.outline import Node

__all__ = ["page"]

_LONG_CHAIN = 8
_CHAIN: dict[str, Format] = {"#": "count", "operation": "code", "module": "code", "from": "text", "to": "text", "line": "text"}
_WEIGHTED = ("conv", "linear", "norm", "embedding")
"""What stands in the name of an operation whose further inputs are weights."""
_NEEDS: dict[str, Format] = {
    "optimizer": "text",
    "parameters": "bytes",
    "gradients": "bytes",
    "optimizer state": "bytes",
    "activations": "bytes",
    "sum": "bytes",
    "fits": "text",
    "largest batch": "count",
}
_PLOTTED: dict[str, Format] = {"parameters": "count", "FLOPs": "count", "activations": "bytes"}


def page(report: ShapesReport) -> Page:
    """The whole report."""
    wrong = report.failure or report.suspect
    blocks: list[Block] = [*(_failure(wrong) if wrong is not None else ())]
    blocks += [Note(problem) for problem in report.problems]
    if report.rows:
        nodes = outline(report)
        totals = (*totals_of(report), ("to read it", legend(report, nodes)))
        blocks += [*_plot(report, nodes), _table(report, nodes), Facts(totals)]
    blocks += _needs(report.needs)
    if report.uncounted_ops:
        title = f"{plural(len(report.uncounted_ops), 'operation')} whose FLOPs are not counted"
        blocks.append(Fold(title, (Facts((("no formula for", ", ".join(f"`{op}`" for op in report.uncounted_ops)),)),)))
    status: Status = "bad" if report.failure else "warn" if report.warning else "good" if report.rows and not report.unused else "info"
    return Page("shapes", status, report.verdict, tuple(blocks))


# Where it broke ---------------------------------------------------------------------------------------------------------


def _failure(failure: Failure) -> list[Block]:
    verified = [fix for fix in failure.fixes if fix.verified]
    others = [fix for fix in failure.fixes if not fix.verified]
    alone = failure.module is None
    advice = [(f"fix {number}" if len(verified) > 1 else "fix", _fix(fix, alone=alone)) for number, fix in enumerate(verified, start=1)]
    advice += [("to try", _fix(fix, alone=alone)) for fix in others]
    location = failure.location
    code = [Code(((location.line, location.source),), location.line, str(location))] if location is not None and location.source else []
    facts = Facts(tuple((name, text) for name, text in _facts(failure) if text))
    return [*([Facts(tuple(advice))] if advice else []), *code, facts, *_chain(failure.chain)]


def _fix(fix: Fix, *, alone: bool) -> str:
    """What to write, why, and what was done to know that it helps."""
    edits = "` and `".join(line.strip() for line in fix.code.splitlines() if line.strip())
    tried = "tried on a copy: the forward comes through"
    if alone:
        tried = "tried on zeros of the same shapes: the operation comes through"
    if not fix.verified:
        tried = "not tried"
    return f"`{edits}`{f' · {fix.why}' if fix.why else ''} · {tried}"


def _facts(failure: Failure) -> list[tuple[str, str]]:
    where = "" if failure.module is None else f"`{failure.module}`" if failure.module else "the model's own forward, outside its parts"
    names = [f"`{name}`" if name else "" for name in failure.operand_names]
    return [
        ("operation", f"`{failure.op}`" if failure.op else ""),
        ("module", where),
        ("operands", shapes(failure.operand_shapes, names)),
        ("error", failure.error),
    ]


def _chain(chain: Sequence[Step]) -> list[Block]:
    if not chain:
        return []
    last = chain[-_LONG_CHAIN:]
    caption = f"How `{shapes((chain[-1].output_shape,))}` came about"
    if len(last) == len(chain):
        return [_steps(caption, chain, 1)]
    everything = _steps(f"{caption}, from the input on", chain, 1)
    return [
        _steps(f"{caption}, the last operations", last, len(chain) - len(last) + 1),
        Fold(f"All {len(chain)} operations", (everything,)),
    ]


def _steps(caption: str, steps: Sequence[Step], first: int) -> Table:
    known = any(step.location is not None for step in steps)
    columns = tuple(_CHAIN) if known else tuple(_CHAIN)[:-1]
    rows = [_step(number, step)[: len(columns)] for number, step in enumerate(steps, first)]
    return Table(caption, columns, rows, _CHAIN, is_sequence=True)


def _step(number: int, step: Step) -> tuple[Cell, ...]:
    line = None if step.location is None else str(step.location)
    data = step.input_shapes[:1] if any(word in step.op for word in _WEIGHTED) else step.input_shapes
    return (number, step.op, step.module or None, shapes(data) or None, shapes((step.output_shape,)), line)


# The table --------------------------------------------------------------------------------------------------------------


def _table(report: ShapesReport, nodes: Sequence[Node]) -> Table:
    """Folded, as a tree; in full beside it, for a view in which one can search. Sorted, it is flat and in full."""
    if report.layout.sort:
        return _sorted(_tree(report, outline(report, folded=False)), report.layout.sort)
    table = _tree(report, nodes)
    many = sum(1 for _ in walk(nodes))
    return table if many == len(report.rows) + len(report.unused) else replace(table, whole=_tree(report, outline(report, folded=False)))


def _tree(report: ShapesReport, roots: Sequence[Node]) -> Table:
    deepest = report.layout.depth
    placed = [(node, above) for node, above in walk(roots) if deepest is None or len(above) <= deepest]
    nodes = [node for node, _ in placed]
    columns = chosen(report, nodes)
    everything = whole(report)
    return Table(
        _caption(report),
        tuple(column.name for column in columns),
        [tuple(column.value(node, everything) for column in columns) for node in nodes],
        {column.name: column.format for column in COLUMNS},
        frozenset(at for at, node in enumerate(nodes) if everything.broken and any(row is everything.broken for row in node.rows)),
        tree=tuple(Place(len(above), _label(node, above)) for node, above in placed),
    )


def _label(node: Node, above: Sequence[Node]) -> str:
    outer = above[-1] if above else None
    name = ".".join(node.names[len(outer.names) if outer is not None else 0 :]) or node.first.type
    many = len(node.rows)
    return f"{name}  (x {many:,})" if many > (len(outer.rows) if outer is not None else 1) else name


def _caption(report: ShapesReport) -> str:
    kind = common_kind(report)
    what = "Every module" if report.mode == "params" else "Every module call up to the failure" if report.failure else "Every module call"
    down = "" if report.layout.depth is None else f" down to depth {report.layout.depth}"
    return f"{what}{down}" + (f", all outputs {kind}" if kind else "")


def _sorted(table: Table, column: str) -> Table:
    if column not in table.columns:
        return table
    at = table.columns.index(column)

    def size(position: int) -> tuple[bool, float, str]:
        value = table.rows[position][at]
        return value is None, 0.0 if value is None or isinstance(value, str) else -value, value if isinstance(value, str) else ""

    order = sorted(range(len(table.rows)), key=size)
    marked = frozenset(new for new, old in enumerate(order) if old in table.marked)
    words = "" if table.is_text(column) else ", largest first"
    caption = f"{table.caption}, by {column}{words}"
    return replace(table, caption=caption, rows=[table.rows[old] for old in order], marked=marked, tree=())


def _plot(report: ShapesReport, nodes: Sequence[Node]) -> list[Bars]:
    parts = largest_parts(report, nodes) if report.layout.plot else []
    if not parts:
        return []
    totals = (report.total_params, report.total_flops, report.activation_bytes)
    columns = [list(values) for values in zip(*map(sizes, parts), strict=True)]
    rest = [total - sum(values) for total, values in zip(totals, columns, strict=True)]
    labels = [full_name(node) for node in parts]
    if any(part > 0 for part in rest):
        labels.append("all else")
        columns = [[*values, max(0, part)] for values, part in zip(columns, rest, strict=True)]
    named = zip(_PLOTTED.items(), columns, strict=True)
    measures = tuple(Measure(name, tuple(values), how) for (name, how), values in named if any(values))
    return [Bars("Where parameters, FLOPs and activations sit" if len(measures) > 1 else "Where parameters sit", tuple(labels), measures)]


# Below the table --------------------------------------------------------------------------------------------------------


def _needs(needs: Sequence[Need]) -> list[Block]:
    if not needs:
        return []
    rows = [
        (
            *(need.optimizer, need.parameters_bytes, need.gradients_bytes, need.optimizer_bytes, need.activations_bytes, need.total_bytes),
            *(None if need.fits is None else "yes" if need.fits else "no", need.largest_batch),
        )
        for need in needs
    ]
    misfits = frozenset(at for at, need in enumerate(needs) if need.fits is False)
    table = Table("To train it, estimated", tuple(_NEEDS), rows, _NEEDS, misfits, is_sequence=True)
    adam = next((need for need in needs if need.optimizer == "Adam"), needs[-1])
    rest = "Not counted: what kernels need for a moment, and what the allocator leaves unused."
    return [Note(f"{adam.sentence} {rest}", "warn" if adam.fits is False else "info"), table]
