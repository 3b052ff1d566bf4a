"""The modules of a graph from the input to the loss, few enough to be drawn, and where the cuts are between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchdebug_magics.instruments.autograd.report import Cut, GraphReport

__all__ = ["ModuleBox", "module_boxes"]

_MOST = 12


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
