"""What each run of the same cell leaves behind: found from the third run on, when a variable holds something of every run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, TypeAlias

from torchdebug_magics.instruments.memtrace.findings import Growth
from torchdebug_magics.instruments.memtrace.growth.holder_weights import place_of
from torchdebug_magics.instruments.memtrace.held.fixes import Cause, collection, fix
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers

if TYPE_CHECKING:
    from collections import deque

    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block

__all__ = ["Run", "rerun_growth"]

_FEWEST = 3
"""Runs from which one may speak of growth: a variable that is bound anew, and another that keeps its last value, hold two."""

Run: TypeAlias = Mapping[str, tuple[int, int]]
"""(blocks, bytes) that a run has left with each holder."""


def rerun_growth(runs: deque[Run], made: Sequence[Block], keepers: Keepers, alive: Sequence[Block], *, trains: bool) -> Growth | None:
    """What grows from run to run of this cell; `runs` are those before it, the earliest first, and this one is added."""
    left = _by_holder(made, keepers)
    runs.append({name: (len(blocks), sum(block.bytes for block in blocks)) for name, blocks in left.items()})
    wanted = {name: sum(run[name][0] for run in runs) for name in left if len(runs) >= _FEWEST and all(name in run for run in runs)}
    if not wanted:
        return None
    keepers = Keepers(alive)
    held = _by_holder(alive, keepers)
    sizes = {name: median_low(run[name][1] for run in runs) for name in wanted if len(held.get(name, ())) >= wanted[name]}
    most = max(sizes, key=lambda name: sizes[name], default="")
    if not most or not sizes[most]:
        return None
    path, place = keepers.of(held[most][0]), place_of(left[most])
    return Growth(
        bytes_per_iteration=sum(sizes.values()),
        iterations_count=len(runs),
        location=None if place is None else place.location,
        holder=most,
        fix=fix(path, Cause(keeps_graph="grad_fn" in path, trains=trains)),
        keeps_graph="grad_fn" in path,
        frees_bytes=keepers.frees_bytes(path, graphs=False),
    )


def _by_holder(blocks: Sequence[Block], keepers: Keepers) -> dict[str, list[Block]]:
    """Those that a variable leads to, by what of it they are in."""
    found: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if keepers.of(block):
            found[collection(keepers.of(block))].append(block)
    return found
