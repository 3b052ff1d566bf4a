"""What each run of the same cell leaves behind: found from the third run on, when something of every run is still alive."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torchdebug_magics.instruments.memtrace.held.fixes import Cause, fix
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
from torchdebug_magics.instruments.memtrace.report import Growth

if TYPE_CHECKING:
    from collections import deque

    import torch

    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger
    from torchdebug_magics.report import Location

__all__ = ["Left", "Run", "rerun_growth"]

_FEWEST = 3
"""Runs from which one may speak of growth: a variable that is bound anew, and another that keeps its last value, hold two."""
_MOST = 2000
"""Storages remembered of a run, the largest."""
_STEP = re.compile(r"\[[^\]]*\]|\.?[^\[.]+")
"""Of a path, such as ``net``, ``._forward_hooks``, ``[6]``."""

Line: TypeAlias = "tuple[str, int, str] | None"


class Left(NamedTuple):
    """A storage that a run has left; it is not kept alive by this."""

    storage: weakref.ref[torch.UntypedStorage]
    location: Location | None


Run: TypeAlias = tuple[Left, ...]


def rerun_growth(runs: deque[Run], ledger: Ledger, made: Iterable[Block], *, trains: bool) -> Growth | None:
    """What grows from run to run of this cell; `runs` are those before it, the earliest first, and this one is added."""
    runs.append(tuple(_left(made)))
    if len(runs) < _FEWEST:
        return None
    growing = _growing([_alive(run) for run in runs])
    if not growing:
        return None
    sizes = {line: median_low(_bytes(run) for run in found) for line, found in growing.items()}
    largest = growing[max(sizes, key=lambda line: sizes[line])]
    firsts = [ledger.live[one.storage._cdata] for one in (max(run, key=_size) for run in largest) if one.storage._cdata in ledger.live]
    keepers = Keepers(firsts)
    path, location = keepers.path(firsts), largest[-1][0].location
    return Growth(
        bytes_per_iteration=sum(sizes.values()),
        iterations_count=len(runs),
        location=location,
        holder=_common([keepers.of(block) for block in firsts]) or path,
        fix=fix(path, Cause(keeps_graph="grad_fn" in path, trains=trains)),
        keeps_graph="grad_fn" in path,
    )


class _Alive(NamedTuple):
    storage: torch.UntypedStorage
    location: Location | None


def _left(made: Iterable[Block]) -> Iterator[Left]:
    for block in sorted(made, key=lambda one: -one.bytes)[:_MOST]:
        storage = None if block.ref is None else block.ref()
        if storage is not None and block.bytes:
            yield Left(weakref.ref(storage), None if block.place is None else block.place.location)


def _alive(run: Run) -> dict[Line, list[_Alive]]:
    """By line: the cell has another number in each run, and the same text."""
    found: dict[Line, list[_Alive]] = defaultdict(list)
    for one in run:
        storage, place = one.storage(), one.location
        if storage is not None:
            found[None if place is None else (place.function, place.line, place.source)].append(_Alive(storage, place))
    return found


def _growing(runs: Sequence[dict[Line, list[_Alive]]]) -> dict[Line, list[list[_Alive]]]:
    """The lines of which something is alive of every run, the earliest run first."""
    lines = set(runs[-1]).intersection(*runs)
    return {line: [run[line] for run in runs] for line in lines}


def _size(one: _Alive) -> int:
    return one.storage.nbytes()


def _bytes(found: Iterable[_Alive]) -> int:
    return sum(map(_size, found))


def _common(paths: Sequence[str]) -> str:
    """``cache`` for ``cache[0]`` and ``cache[1]``: where what each run has left is together."""
    steps = zip(*(_STEP.findall(path) for path in paths if path), strict=False)
    return "".join(first for first, *others in takewhile(lambda step: len(set(step)) == 1, steps))
