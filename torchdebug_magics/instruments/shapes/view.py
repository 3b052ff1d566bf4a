"""The page of a shapes report: the failure with its fix, or the table; then folds with the path, the layers and the totals."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from torchdebug_magics.format import Format, byte_size, capitalised, count, listed, plural
from torchdebug_magics.html.page import Bars, Block, Cell, Code, Facts, Fold, Measure, Note, Page, Place, Table
from torchdebug_magics.instruments.shapes.outline import COLUMNS, Node, chosen, common_kind, full_name, outline, shapes, walk, whole
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Need, ShapesReport, Step

_SHOWN_FIXES = 2
_LONG_CHAIN = 8
_CHAIN: dict[str, Format] = {"#": "count", "operation": "code", "module": "code", "from": "text", "to": "text", "line": "text"}
_WEIGHTED = ("conv", "linear", "norm", "embedding")
"""What stands in the name of an operation whose further inputs are weights."""
_NEEDS: dict[str, Format] = {
    "optimizer": "text",
    **dict.fromkeys(("parameters", "gradients", "optimizer state", "activations", "sum"), "bytes"),
    "fits": "text",
    "largest batch": "count",
}
_PLOTTED: dict[str, Format] = {"parameters": "count", "FLOPs": "count", "activations": "bytes"}
_HOW = {
    "fake": "the forward ran on tensors without data: nothing was computed, the model is unchanged",
    "meta": "the weights are on `meta` and have no data: nothing was computed",
    "real": "the forward ran on real tensors",
    "params": "the forward was not run",
}
_SHARED = "; ops on DTensors are counted once for all ranks"
_ENOUGH, _MOST = 8, 20
_LARGE, _SMALL = 0.1, 0.01
"""Shares of the whole: a part that holds less is not taken apart, is not shown."""


def page(report: ShapesReport) -> Page:
    """Lay out the report: what failed and the fix, or the table; everything else is folded."""
    nodes = outline(report) if report.rows else ()
    wrong = report.failure or report.suspect
    blocks: list[Block] = [*(_wrong(wrong) if wrong is not None else _summary(report))]
    blocks += [*(Note(problem, "warn") for problem in report.problems), *map(Note, report.notes)]
    table, plot = [_table(report, nodes)] if nodes else [], _plot(report, nodes)
    if report.failure is None:
        blocks += plot or table
    blocks += _path(wrong.chain) if wrong is not None else []
    if table and (plot or report.failure is not None):
        calls = plural(len(report.rows), "module" if report.mode == "params" else "module call")
        blocks.append(Fold(f"Layers: {calls}{' up to the failure' if report.failure else ''}", (*(plot if report.failure else ()), *table)))
    blocks += [*_training(report.needs), *_details(report, nodes)]
    return Page("shapes", report.status, report.title, tuple(blocks))


def _summary(report: ShapesReport) -> list[Block]:
    """What the headline has no room for, where nothing is wrong."""
    facts = [] if report.rows and report.mode != "params" else [("error" if report.last_error else "to do", report.advice)]
    if report.rows and report.mode != "params":
        adam = _adam(report.needs)
        facts = [("cost", f"{report.cost}{f'; {adam.sentence}' if adam is not None and adam.fits is not False else ''}")]
    if report.inputs and report.inputs not in report.title:
        facts.insert(0, ("input", report.inputs))
    if report.unused:
        facts.append(("never called", f"{listed([f'`{path}`' for path in report.unused])}: the forward does not use their parameters"))
    misfit = [Note(capitalised(need.sentence), "warn") for need in filter(None, [_adam(report.needs)]) if need.fits is False]
    return [Facts(tuple(facts)), *misfit]


# Where it failed --------------------------------------------------------------------------------------------------------
def _wrong(failure: Failure) -> list[Block]:
    """The fix, the reason, and the line."""
    alone = failure.module is None
    verified = [fix for fix in failure.fixes if fix.verified]
    names = ["fix", *["or"] * len(verified)] if verified else ["to try", *["or"] * len(failure.fixes)]
    fixes = [(name, _fix(fix, alone=alone)) for name, fix in zip(names, failure.fixes, strict=False)]
    facts = (*fixes[:_SHOWN_FIXES], *([("why", failure.reason)] if failure.reason else []))
    where = failure.location
    code = [Code(((where.line, where.source),), where.line, str(where), failure.underlined)] if where and where.source else []
    return [*([Facts(facts)] if facts else []), *code]


def _fix(fix: Fix, *, alone: bool) -> str:
    """The code to write, what it does, and how it was verified; words, such as the size of an input, are not set as code."""
    edits = "` and `".join(line.strip() for line in fix.code.splitlines() if line.strip())
    try:
        ast.parse(f"{fix.code.removeprefix('el')} pass" if fix.code.endswith(":") else fix.code)
        edits = f"`{edits}`"
    except SyntaxError:
        pass
    verified = "verified on zeros of the same shapes" if alone else "verified on a copy"
    verified = "verified to the end of the step" if fix.to_the_end else verified
    return f"{edits}{f' · {fix.why}' if fix.why else ''} · {verified if fix.verified else 'not verified'}"


def _details(report: ShapesReport, nodes: Sequence[Node]) -> list[Block]:
    """The rest: the op and its operands, the totals, how they were found."""
    wrong = report.failure or report.suspect
    facts = [] if wrong is None else [(name, text) for name, text in _facts(wrong) if text]
    if wrong is not None:
        facts += [(f"fix {at}", _fix(fix, alone=wrong.module is None)) for at, fix in enumerate(wrong.fixes, 1) if at > _SHOWN_FIXES]
    facts += [*totals_of(report), ("table", legend(report, nodes))] if nodes else []
    if report.uncounted_ops:
        facts.append(("not counted", f"FLOPs of {', '.join(f'`{op}`' for op in report.uncounted_ops)}"))
    if not facts:
        return []
    what = ["operands and error"] if report.failure else ["operands"] if wrong is not None else []
    return [Fold(f"Details: {', '.join([*what, *(['totals and method'] if nodes else [])])}", (Facts(tuple(facts)),))]


def _facts(failure: Failure) -> list[tuple[str, str]]:
    where = "" if failure.module is None else f"`{failure.module}`" if failure.module else "the model's own forward"
    names = [f"`{name}`" if name else "" for name in failure.operand_names]
    return [
        ("operation", f"`{failure.op}`" if failure.op else ""),
        ("module", where),
        ("operands", shapes(failure.operand_shapes, names)),
        ("error", failure.error),
    ]


def _path(chain: Sequence[Step]) -> list[Block]:
    """The ops that computed the mismatching shape."""
    if not chain:
        return []
    last = chain[-_LONG_CHAIN:]
    caption = f"Path of the shape `{shapes((chain[-1].output_shape,))}`"
    title = f"{caption}: {plural(len(chain), 'operation')}"
    if len(last) == len(chain):
        return [Fold(title, (_steps(caption, chain, 1),))]
    whole = Fold(f"All {len(chain)} operations", (_steps(f"{caption}, from the input on", chain, 1),))
    return [Fold(title, (_steps(f"{caption}, the last {len(last)} operations", last, len(chain) - len(last) + 1), whole))]


def _steps(caption: str, steps: Sequence[Step], first: int) -> Table:
    known = any(step.location is not None for step in steps)
    columns = tuple(_CHAIN) if known else tuple(_CHAIN)[:-1]
    rows: list[tuple[Cell, ...]] = []
    for number, step in enumerate(steps, first):
        data = step.input_shapes[:1] if any(word in step.op for word in _WEIGHTED) else step.input_shapes
        places = [] if not known else [None if step.location is None else str(step.location)]
        rows.append((number, step.op, step.module or None, shapes(data) or None, shapes((step.output_shape,)), *places))
    return Table(caption, columns, rows, _CHAIN, is_sequence=True)


# The table --------------------------------------------------------------------------------------------------------------
def _table(report: ShapesReport, nodes: Sequence[Node]) -> Table:
    """A tree with repeated blocks folded, and the unfolded rows for a view with a search field; sorted, a flat list of all rows."""
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
    times = len(node.rows) // (len(outer.rows) if outer is not None else 1)
    return f"{name}  (x {times:,})" if times > 1 else name


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
        labels.append("other")
        columns = [[*values, max(0, part)] for values, part in zip(columns, rest, strict=True)]
    named = zip(_PLOTTED.items(), columns, strict=True)
    measures = tuple(Measure(name, tuple(values), how) for (name, how), values in named if any(values))
    return [Bars("Parameters, FLOPs and activations by module" if len(measures) > 1 else "Parameters by module", tuple(labels), measures)]


# Below the table --------------------------------------------------------------------------------------------------------
def _adam(needs: Sequence[Need]) -> Need | None:
    """The optimizer that most people train with."""
    return next((need for need in needs if need.optimizer == "Adam"), needs[-1] if needs else None)


def _training(needs: Sequence[Need]) -> list[Block]:
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
    table = Table("Training memory, estimated", tuple(_NEEDS), rows, _NEEDS, misfits, is_sequence=True)
    rest = Note("Not included: temporary buffers of kernels, and memory that the allocator reserves but does not use.")
    return [Fold(f"Training memory with {listed([need.optimizer for need in needs])}", (table, rest))]


def totals_of(report: ShapesReport) -> list[tuple[str, str]]:
    """Parameters, FLOPs, activations, and how they were found; a name and a text each."""
    frozen = report.total_params - report.trainable_params
    trained = f"{report.trainable_params:,} trainable, {frozen:,} frozen" if frozen else "all trainable" if report.total_params else ""
    totals = [("parameters", ", ".join(filter(None, (f"{report.total_params:,} ({report.size})", trained))))]
    if report.buffer_count:
        totals.append(("buffers", f"{report.buffer_count:,} ({byte_size(report.buffer_bytes)})"))
    if report.mode != "params":
        until = " up to the failure" if report.failure else " in one forward"
        totals.append(("FLOPs", f"{count(report.total_flops)}{until}; 2 per multiply-add{_SHARED if report.has_shared_flops else ''}"))
        totals.append(("activations", f"{byte_size(report.activation_bytes)} saved for the backward pass{until if report.failure else ''}"))
    if any(row.formula for row in report.rows):
        fixed = f"{report.symbols}; other letters" if report.symbols else "letters"
        totals.append(("symbols", f"{fixed} are sizes of the input, such as `B` for the batch size"))
    if report.unused:
        totals.append(("never called", f"{', '.join(f'`{path}`' for path in report.unused)}: the forward does not use their parameters"))
    unchecked, checked = (", ".join(f"`{op}`" for op in ops) for ops in (report.unchecked_ops, report.checked_ops))
    unchecked = f"; {unchecked} may reject values, which only `--real` checks" if unchecked else ""
    checked = f"; then once on real tensors, as {checked} may reject values" if checked else ""
    return [*totals, ("method", f"{_HOW[report.mode]}{unchecked}{checked}")]


def legend(report: ShapesReport, nodes: Sequence[Node]) -> str:
    """Say which modules and calls a number of the table stands for."""
    columns = "params include" if report.mode == "params" else "params, FLOPs and activations include"
    text = f"{columns} all submodules"
    folded = next((node for node, _ in walk(nodes) if len(node.rows) > 1), None)
    if folded is None or report.layout.sort:
        return text
    return f"{text}; `{full_name(folded)}` stands for {len(folded.rows):,} equal calls, with the numbers of one"


def largest_parts(report: ShapesReport, roots: Sequence[Node]) -> list[Node]:
    """Begin with the roots, and take the largest apart for as long as there is room; the others are left out; in the order of the calls."""
    parts = list(roots)
    totals = (report.total_params, report.total_flops, report.activation_bytes)

    def size(node: Node) -> float:
        return max(part / whole if whole else 0.0 for part, whole in zip(sizes(node), totals, strict=True))

    while len(parts) < _ENOUGH:
        apart = [node for node in parts if node.inside and size(node) >= _LARGE]
        if not apart:
            break
        at = parts.index(max(apart, key=size))
        parts[at : at + 1] = parts[at].inside
    shown = sorted((at for at, node in enumerate(parts) if size(node) >= _SMALL), key=lambda at: -size(parts[at]))[:_MOST]
    return [parts[at] for at in sorted(shown)]


def sizes(node: Node) -> tuple[int, int, int]:
    """Parameters, FLOPs, bytes of activations."""
    return node.params, node.flops, node.activation_bytes
