"""What Python's collector would free, found by its own rule and left as it is: no finalizer runs, and no weak reference is cleared."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import compress
from typing import Any

from torchdebug_magics.probing.referents import referents

__all__ = ["garbage"]

_MOST_OBJECTS = 3_000_000
"""Beyond, it takes seconds, and nobody has asked for a collection."""


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
    return _without_latecomers(found)


def _outside(objects: list[Any]) -> list[int]:
    """How many references to each come from elsewhere than these objects themselves."""
    inside = Counter(map(id, referents(*objects)))
    ours = next(map(sys.getrefcount, [object()]))  # by the list, and by the question itself
    counts = list(map(sys.getrefcount, objects))
    return [count - ours - inside.get(id(one), 0) for one, count in zip(objects, counts, strict=True)]


def _without_latecomers(found: list[Any]) -> list[Any]:
    """Those that are held by each other alone when they are asked once more: another thread may have moved one meanwhile."""
    while any(outside := _outside(found)):
        found = [one for one, count in zip(found, outside, strict=True) if not count]
    return found
