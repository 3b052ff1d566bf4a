"""Growth where no op is followed: a counter tells how much each iteration adds, and what stayed tells who keeps it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.held.fixes import Cause, collection, fix
from torchdebug_magics.instruments.memtrace.report import Growth

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Loop

__all__ = ["MADE_ONCE", "Kept", "fastest", "grown_by_counter", "kept_most", "rate_bytes"]

Kept = tuple[str, int]
"""(path of the first of the largest of many tensors that a variable holds, bytes of all)."""

_FEWEST = 3
_LEAST_BYTES = 1 << 10
_MOST_PART = 0.6
_HALF = 0.5
_THIRDS, _SEVERAL = 3, 3
_ABOUT = 2.5
MADE_ONCE = re.compile(r"\.state\[\.\.\.\]\['(exp_avg|exp_avg_sq|step|momentum_buffer|square_avg)'\]$|\.grad$")
"""What the first step makes, in the path to it."""


def rate_bytes(loop: Loop | None) -> int:
    """By how much the heap grows in each step; 0 where it does not, only at times, until a cache is filled, or a list is emptied.

    The first step makes gradients and states.
    """
    grown = loop.heap_growth()[1:] if loop is not None else []
    if len(grown) < _FEWEST:
        return 0
    usual = median(grown)
    steady = sum(1 for one in grown if one >= usual / 2) >= _MOST_PART * len(grown)
    early_bytes, late_bytes = sum(grown[: len(grown) // 2]), sum(grown[len(grown) // 2 :])
    goes_on = late_bytes >= _HALF * early_bytes and early_bytes + late_bytes >= _HALF * usual * len(grown)
    is_emptied = -min(grown[len(grown) // _THIRDS :]) >= _SEVERAL * usual
    return round(usual) if usual >= _LEAST_BYTES and steady and goes_on and not is_emptied else 0


def fastest(loops: Iterable[Loop]) -> Loop | None:
    """The one in which most was added; None where none of them grows."""
    return max((loop for loop in loops if rate_bytes(loop)), key=lambda loop: rate_bytes(loop) * loop.count, default=None)


def kept_most(found: Iterable[tuple[int, str]], wanted_bytes: int) -> Kept | None:
    """Of (bytes, path) of what came anew: the variable that holds about as much as was added, and in pieces.

    A model, its gradients and the states of its optimizer are as old as the loop, and of another size.
    """
    held: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for size_bytes, path in found:
        if path and collection(path) != path and not MADE_ONCE.search(path):
            held[collection(path)].append((path, size_bytes))
    many = [
        (sum(size_bytes for _, size_bytes in pieces), min((-size_bytes, len(path), path) for path, size_bytes in pieces)[2])
        for pieces in held.values()
        if len(pieces) >= _FEWEST
    ]
    fitting = [one for one in many if wanted_bytes / _ABOUT <= one[0] <= wanted_bytes * _ABOUT]
    return (max(fitting)[1], max(fitting)[0]) if fitting else None


def grown_by_counter(loop: Loop, path: str, cause: Cause) -> Growth:
    """What is said of that loop."""
    return Growth(
        bytes_per_iteration=rate_bytes(loop),
        iterations_count=loop.count,
        location=None,
        holder=path,
        fix=fix(path, cause),
        keeps_graph=cause.keeps_graph,
    )
