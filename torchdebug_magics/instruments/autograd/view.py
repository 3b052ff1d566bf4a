"""The page of an autograd report: the fix, the reason, the lines and the code; for a loss, the modules that it reaches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchdebug_magics.format import byte_size, capitalised, listed, plural, share
from torchdebug_magics.html.page import Block, Box, Boxes, Code, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.autograd.report import AutogradFinding, AutogradReport, Cut, GraphReport, LiveAutograd
from torchdebug_magics.report import Location

_FEW_NAMES = 3
_CUTS = {
    "detach": "`detach`", "no_grad": "disabled gradients", "lift_fresh": "a copy into a new tensor",
    "_local_scalar_dense": "a copy into Python numbers", "_to_copy": "a cast to integers or bools",
}  # fmt: skip
_MOST = 12


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


def _finding(finding: AutogradFinding) -> list[Block]:
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


@dataclass(frozen=True)
class ModuleBox:
    """A module, or all modules with the same beginning of their paths."""

    path: str
    """"" for what is computed before the first parameter."""
    reached_count: int = 0
    missed_count: int = 0
    frozen_count: int = 0
    saved_bytes: int = 0
    cuts: tuple[Cut, ...] = ()
    """Behind it, on the way to the loss."""


def module_boxes(report: GraphReport) -> tuple[ModuleBox, ...]:
    """In the order of the graph; what the graph does not hold stands where the model has it."""
    paths = {one.module: one.saved_bytes for one in report.modules}
    owners = list(dict.fromkeys(_owner(one.name) for one in report.reaches))
    boxes = [ModuleBox(path, saved_bytes=paths.get(path, 0)) for path in _merged(list(paths), owners)]
    counted = [_counted(box, report) for box in boxes]
    drawn = _folded([box for box in counted if box.saved_bytes or box.reached_count or box.missed_count or box.frozen_count])
    return _with_cuts(drawn, report.cuts)


def _owner(name: str) -> str:
    return name.rpartition(".")[0] if "." in name else name


def _merged(graph: list[str], model: Sequence[str]) -> list[str]:
    """The paths of the graph, and each other one behind the one before it in the model."""
    order = [path for path in graph if path in model or not path]
    before = ""
    for path in model:
        if path not in order:
            order.insert(order.index(before) + 1 if before in order else 0, path)
        before = path
    return order


def _counted(box: ModuleBox, report: GraphReport) -> ModuleBox:
    own = [one for one in report.reaches if _owner(one.name) == box.path]
    frozen = sum(one.is_frozen for one in own)
    reached = sum(one.reached for one in own)
    return replace(box, reached_count=reached, frozen_count=frozen, missed_count=len(own) - reached - frozen)


def _folded(boxes: list[ModuleBox]) -> list[ModuleBox]:
    """Joined by the beginning of their paths, as long as there are too many."""
    for depth in range(max((box.path.count(".") for box in boxes), default=0), 0, -1):
        if len(boxes) <= _MOST:
            break
        joined: dict[str, ModuleBox] = {}
        for box in boxes:
            path = ".".join(box.path.split(".")[:depth])
            joined[path] = _sum(joined.get(path, ModuleBox(path)), box)
        boxes = list(joined.values())
    return boxes


def _sum(one: ModuleBox, other: ModuleBox) -> ModuleBox:
    return ModuleBox(
        one.path,
        one.reached_count + other.reached_count,
        one.missed_count + other.missed_count,
        one.frozen_count + other.frozen_count,
        one.saved_bytes + other.saved_bytes,
    )


def _with_cuts(boxes: list[ModuleBox], cuts: Iterable[Cut]) -> tuple[ModuleBox, ...]:
    """Each line once, behind the last box that it cuts off: one that the line names, else the last before a box that is reached."""
    by_line = {str(cut.location): cut for cut in reversed(tuple(cuts))}
    for cut in reversed(by_line.values()):
        missed = [at for at, box in enumerate(boxes) if box.missed_count and not box.reached_count]
        inside = [at for at in missed if boxes[at].path.startswith(cut.module or "")]
        source = cut.location.source if cut.location is not None else ""
        named = [at for at in inside if re.search(rf"\.{re.escape(_below(boxes[at].path, cut.module))}\b", source)]
        ends = [at for at in inside if at + 1 < len(boxes) and boxes[at + 1].reached_count]
        at = next(iter((named or ends or inside or missed)[-1:]), None)
        if at is not None:
            boxes[at] = replace(boxes[at], cuts=(*boxes[at].cuts, cut))
    return tuple(boxes)


def _below(path: str, module: str | None) -> str:
    return path.removeprefix(f"{module}.").partition(".")[0] if module else path.partition(".")[0]
