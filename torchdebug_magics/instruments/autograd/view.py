"""The page of an autograd report: the fix, the reason, the lines and the code; for a loss, the modules that it reaches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from torchdebug_magics.format import byte_size, capitalised, listed, plural, share
from torchdebug_magics.html.page import Block, Box, Boxes, Code, Facts, Fold, Note, Page, Status, Table
from torchdebug_magics.instruments.autograd.report import AutogradFinding, AutogradReport, Cut, GraphReport, LiveAutograd, Reach, cutter
from torchdebug_magics.report import Location

_FEW_NAMES = 3
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
    return Page("autograd", report.status, capitalised(report.title), tuple(blocks))


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
    missed = [reach.name for reach in report.reaches if reach.is_missed]
    if report.finding is not None:
        blocks += _finding(report.finding)
    elif missed:
        blocks.append(Facts((("not reached", listed(missed)),)))
    if drawn:
        whole = f"{plural(report.nodes_count, 'graph node')}, {byte_size(report.saved_bytes)} saved for backward"
        boxes = (*(box.drawn() for box in drawn), Box("loss", whole, "info"))
        blocks.append(Boxes("Modules that the gradient of the loss reaches, from input to loss", boxes))
    blocks += [Note(problem, "warn") for problem in report.problems]
    if report.cuts and not drawn:
        rows = [(cut.op, cut.module, _at(cut.location)) for cut in report.cuts]
        table = Table("Lines that cut the graph", ("op", "module", "line"), rows, {"line": "code"})
        blocks.append(Fold(f"Lines that cut the graph: {len(rows)}", (table,)) if report.finding is not None else table)
    if report.reaches:
        table = _parameters(report)
        blocks.append(Fold(f"Parameters: {plural(len(table.rows), 'row')}", (table,)) if drawn else table)
    status: Status = "bad" if report.found else "warn" if missed else "good" if report.reaches else "info"
    return Page("autograd", status, capitalised(report.title), tuple(blocks))


def _parameters(report: GraphReport) -> Table:
    rows = [
        (reach.name, "reached" if reach.reached else "frozen" if reach.is_frozen else "not reached", reach.path_length, reach.grad_norm)
        for reach in report.reaches
    ]
    marked = frozenset(place for place, one in enumerate(report.reaches) if one.is_missed)
    formats = {"nodes to the loss": "count", "gradient norm": "number"}
    return Table("Parameters", ("parameter", "state", "nodes to the loss", "gradient norm"), rows, formats, marked)  # type: ignore[arg-type]


@dataclass
class ModuleBox:
    """A module, or all modules with the same beginning of their paths."""

    path: str
    """"" for what is computed before the first parameter."""
    parameters: list[Reach] = field(default_factory=list)
    saved_bytes: int = 0
    cuts: list[Cut] = field(default_factory=list)
    """Behind it, on the way to the loss."""

    @property
    def reached_count(self) -> int:
        """Parameters that the gradient reaches."""
        return sum(parameter.reached for parameter in self.parameters)

    @property
    def is_cut_off(self) -> bool:
        """Whether the gradient should reach it, and reaches none of its parameters."""
        return not self.reached_count and any(parameter.is_missed for parameter in self.parameters)

    def drawn(self) -> Box:
        """As a page shows it."""
        missed = sum(parameter.is_missed for parameter in self.parameters)
        frozen, trainable = len(self.parameters) - self.reached_count - missed, plural(self.reached_count + missed, "parameter")
        reached = f"{self.reached_count} of {trainable} reached" if self.reached_count else f"not reached: {trainable}" if missed else ""
        saved = f"{byte_size(self.saved_bytes)} saved for backward" if self.saved_bytes else ""
        text = ", ".join(filter(None, (reached, f"{plural(frozen, 'parameter')} frozen" if frozen else "", saved)))
        status: Status = "bad" if self.is_cut_off else "warn" if missed else "good" if self.reached_count else "info"
        cuts = (f"cut by {cutter(cut.cause, cut.op).rstrip(',')} · {_at(cut.location)}" for cut in self.cuts)
        return Box(self.path or "before the first parameter", text, status, tuple(cuts))


def module_boxes(report: GraphReport) -> list[ModuleBox]:
    """In the order of the graph; what the graph does not hold stands behind the one before it in the model."""
    sizes = dict(report.modules)
    members: dict[str, list[Reach]] = {}
    for reach in report.reaches:
        members.setdefault(reach.name.rpartition(".")[0] if "." in reach.name else reach.name, []).append(reach)
    order, before = [path for path in sizes if path in members or not path], ""
    for path in members:
        if path not in order:
            order.insert(order.index(before) + 1 if before in order else 0, path)
        before = path
    boxes: dict[str, ModuleBox] = {}
    for depth in range(max((path.count(".") for path in order), default=0) + 1, 0, -1):  # joined by the beginning of their paths
        boxes = {}
        for path in order:
            if members.get(path) or sizes.get(path):
                short = ".".join(path.split(".")[:depth])
                box = boxes.setdefault(short, ModuleBox(short))
                box.parameters += members.get(path, [])
                box.saved_bytes += sizes.get(path, 0)
        if len(boxes) <= _MOST:
            break
    return _with_cuts(list(boxes.values()), report.cuts)


def _with_cuts(boxes: list[ModuleBox], cuts: Iterable[Cut]) -> list[ModuleBox]:
    """Each line once, behind the last box that it cuts off: one that the line names, else the last before a box that is reached."""
    by_line = {str(cut.location): cut for cut in reversed(tuple(cuts))}
    missed = [(box, following) for box, following in pairwise([*boxes, ModuleBox("")]) if box.is_cut_off]
    for cut in reversed(by_line.values()):
        prefix = f"{cut.module}." if cut.module else ""
        source = cut.location.source if cut.location is not None else ""
        inside = [(box, following) for box, following in missed if box.path.startswith(cut.module or "")]
        parts = [(box, box.path.removeprefix(prefix).partition(".")[0]) for box, _ in inside]
        named = [box for box, part in parts if re.search(rf"\.{re.escape(part)}\b", source)]
        ends = [box for box, following in inside if following.reached_count]
        for box in (named or ends or [box for box, _ in inside or missed])[-1:]:
            box.cuts.append(cut)
    return boxes
