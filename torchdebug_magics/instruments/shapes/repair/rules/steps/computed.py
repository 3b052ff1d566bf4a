"""Indices that the forward computes: positions that `argmax` and its like tell, and numbers that were rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.shapes.repair.size_history import RESHAPES, TURNS, came_from, steps

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.follow.origins import Made
    from torchdebug_magics.instruments.shapes.repair.failure_facts import Sizes

__all__ = ["Counted", "counted", "is_rounded"]

_FINDS = frozenset(["argmax", "argmin", "max", "min", "topk", "sort", "argsort", "multinomial"])
_LAYS_OUT = RESHAPES | TURNS | {"__getitem__", "unsqueeze", "squeeze", "expand", "clone", "contiguous", "to", "long", "detach"}
_ROUNDS = frozenset(["floor", "round", "ceil", "trunc", "long", "int", "to"])


@dataclass(frozen=True, eq=False)
class Counted:
    """An op that tells a position among so many."""

    op: str
    many: int
    source: str
    """Where those came from, in words."""
    before: Made | None
    """What it looked through, where that was its last dimension."""


def counted(made: Made | None) -> Counted | None:
    """Where the indices are positions that an op found in another tensor, and were only laid out otherwise since then."""
    for step in steps(made):
        if step.op in _FINDS and step.inputs and step.inputs[0][0]:
            sizes, before = step.inputs[0]
            dim = _looked_along(sizes, step.shape)
            many = math.prod(sizes) if dim is None else sizes[dim]
            return Counted(step.op, many, came_from(before), before if dim == len(sizes) - 1 else None)
        if step.op not in _LAYS_OUT:
            return None
    return None


def _looked_along(sizes: Sizes, found: Sizes) -> int | None:
    """The dimension that is not the same in what was found, the last one where it is unknown; None where all are gone."""
    if not found and len(sizes) > 1:
        return None
    for dim in range(len(sizes) - 1, -1, -1):
        before, behind = sizes[:dim], sizes[dim + 1 :]
        if found == before + behind or (len(found) == len(sizes) and (found[:dim], found[dim + 1 :]) == (before, behind)):
            return dim
    return len(sizes) - 1


def is_rounded(made: Made | None) -> bool:
    """Whether the indices were made from floating-point numbers."""
    return any(step.op in _ROUNDS for step in steps(made))
