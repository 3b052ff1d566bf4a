"""Memory that is held for a small part of it alone: a slice keeps all that it was cut from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchdebug_magics.probing.holders.objects import is_array
from torchdebug_magics.probing.holders.tensor_holders import shown_bytes, storages_of

if TYPE_CHECKING:
    from torchdebug_magics.probing.holders.walk import Walk

__all__ = ["is_sliced"]


def is_sliced(walk: Walk, holders: list[int]) -> bool:
    """Whether those objects, which stand for one storage, show less than half of it."""
    whole = next((storage.nbytes() for number in holders for storage in storages_of(walk.objects[number])), 0)
    among = frozenset(holders)
    shown = [_shown(walk, number) for number in holders if walk.first[number] not in among]  # the others are the bases of views
    return None not in shown and 0 < 2 * sum(one or 0 for one in shown) < whole


def _shown(walk: Walk, number: int) -> int | None:
    """By a tensor, or by what of it the arrays show that hold it."""
    found = shown_bytes(walk.objects[number])
    while found is not None and (number := walk.first[number]) >= 0 and is_array(type(walk.objects[number])):
        kind: Any = sys.modules["numpy"].ndarray
        found = min(found, int(kind.nbytes.__get__(walk.objects[number])))
    return found
