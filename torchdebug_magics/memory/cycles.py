"""Cycles of references: what only the collector frees, and through which attributes it holds itself."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import closing
from itertools import compress
from types import CellType, FrameType, FunctionType
from typing import Any

from torchdebug_magics.memory.containers import CONTAINERS, is_a
from torchdebug_magics.memory.found import edges, reach
from torchdebug_magics.memory.paths import HolderPath, Names, shortened
from torchdebug_magics.memory.walk import Rank, Root, Walk
from torchdebug_magics.probing.state.attributes import referents, undisturbed

_PASSES = 3
_MOST_VISITS = 300_000
_MOST_OBJECTS = 3_000_000
"""Beyond, it takes seconds, and nobody has asked for a collection."""


def cycles_of(storages: Iterable[weakref.ref[Any]]) -> dict[int, HolderPath]:
    """Collect, as ``gc.collect()`` does, until nothing more comes.

    By the `_cdata` of each of `storages` that is gone then: the cycle that held it, such as ``Node.children[0] -> Node.parent``.
    """
    alive = [(ref, storage._cdata) for ref in storages if (storage := ref()) is not None]
    storage = None
    named: dict[int, HolderPath] = {}
    for _ in range(_PASSES):
        found = _garbage()
        if not found:
            break
        with undisturbed():
            named.update(_named(found, {address for _, address in alive} - set(named)))
        del found
        gc.collect()
    return {address: named[address] for ref, address in alive if ref() is None and address in named}


def waiting_cycles(storages: Iterable[weakref.ref[Any]]) -> dict[int, HolderPath]:
    """What a collection would free of these, as things stand: nothing is collected."""
    wanted = [storage._cdata for ref in storages if (storage := ref()) is not None]
    with undisturbed():
        found = garbage()
        return _named(found, wanted) if found else {}


def _garbage() -> list[Any]:
    """What a collection finds, still there: it is freed when this list is dropped and another collection has run."""
    flags, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    found = gc.garbage[before:]
    del gc.garbage[before:]
    return found


def _named(garbage: list[Any], wanted: Collection[int]) -> dict[int, HolderPath]:
    with closing(Walk([Root("", one, Rank.VARIABLE) for one in garbage], wanted, _MOST_VISITS)) as walk:
        inside, back = edges(walk.sources, walk.targets), edges(walk.targets, walk.sources)
        on_a_way_round = _trimmed(inside, back)
        known: dict[int, HolderPath] = {}
        for holders in walk.holders.values():
            cycle = [] if any(number in known for number in holders) else _nearest_cycle(holders, inside, back, on_a_way_round)
            if cycle:
                # Whatever a cycle leads to is held by it; that it is held by another one, too, would be no other advice.
                text = _written([walk.objects[number] for number in cycle])
                known |= dict.fromkeys(reach(cycle, inside) - known.keys(), text)
        first = {storage: next((number for number in holders if number in known), None) for storage, holders in walk.holders.items()}
        return {storage: known[number] for storage, number in first.items() if number is not None}


def _trimmed(inside: dict[int, list[int]], back: dict[int, list[int]]) -> set[int]:
    """Without the objects that hold none of the rest, again and again: those that are left stand on cycles, or before one."""
    degrees = {number: len(targets) for number, targets in inside.items()}
    ends = [number for number in back if number not in degrees]
    while ends:
        for holder in back.get(ends.pop(), ()):
            degrees[holder] -= 1
            if not degrees[holder]:
                ends.append(holder)
    return {number for number, degree in degrees.items() if degree}


def _nearest_cycle(starts: list[int], inside: dict[int, list[int]], back: dict[int, list[int]], among: Collection[int]) -> list[int]:
    """The numbers of the objects of the nearest cycle from which the starts are held; the first again at its end."""
    seen, todo = set(starts), list(starts)
    for number in todo:
        cycle = _way_round(number, inside) if number in among else []
        if cycle:
            return cycle
        new = [holder for holder in dict.fromkeys(back.get(number, ())) if holder not in seen]
        seen.update(new)
        todo += new
    return []


def _way_round(start: int, inside: dict[int, list[int]]) -> list[int]:
    """The shortest way from an object back to itself."""
    came_from = dict.fromkeys(inside.get(start, ()), start)
    todo = list(came_from)
    for number in todo:
        if number == start:
            break
        new = [target for target in inside.get(number, ()) if target not in came_from]
        came_from.update(dict.fromkeys(new, number))
        todo += dict.fromkeys(new)
    if start not in came_from:
        return []
    way = [start]
    while len(way) == 1 or way[-1] != start:
        way.append(came_from[way[-1]])
    return way[::-1]


def _written(cycle: list[Any]) -> HolderPath:
    """Types and attributes; containers, frames and cells have no name of their own."""
    begin = next((at for at, part in enumerate(cycle) if _has_name(part)), 0)
    around = [*cycle[begin:-1], *cycle[: begin + 1]]
    pieces: list[str] = []
    for piece, at in Names().along(around):
        is_named = at + 1 < len(around) and _has_name(around[at])
        pieces += [piece, f" -> {_name(around[at])}"] if is_named else [piece]
    return HolderPath(_name(around[0]), shortened(pieces))


def _has_name(value: object) -> bool:
    return not any(is_a(type(value), one) for one in (*CONTAINERS, CellType, FrameType))


def _name(value: object) -> str:
    return f"{value.__name__}()" if type(value) is FunctionType else type(value).__name__


def garbage() -> list[Any]:
    """The objects to which nothing leads but each other; none where there are too many to ask."""
    objects = gc.get_objects()
    if len(objects) > _MOST_OBJECTS:
        return []
    # An object with no reference from outside lives only if one that has some leads to it.
    unheld = [not outside for outside in _outside(objects)]
    waiting = {id(one): one for one in compress(objects, unheld)}
    newly = [one for one in objects if id(one) not in waiting]
    while newly:
        newly = [waiting.pop(address) for address in waiting.keys() & set(map(id, referents(*newly)))]
    found = list(waiting.values())
    for ours in (objects, waiting):
        ours.clear()
    while any(outside := _outside(found)):  # another thread may have moved one meanwhile
        found = [one for one, count in zip(found, outside, strict=True) if not count]
    return found


def _outside(objects: list[Any]) -> list[int]:
    """How many references to each come from elsewhere than these objects themselves."""
    inside = Counter(map(id, referents(*objects)))
    ours = next(map(sys.getrefcount, [object()]))  # by the list, and by the question itself
    counts = list(map(sys.getrefcount, objects))
    return [count - ours - inside.get(id(one), 0) for one, count in zip(objects, counts, strict=True)]
