"""How Python objects are looked at and put back: the shape of it, and the containers."""

from __future__ import annotations

import itertools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from torchdebug_magics.probing.source.user_code import is_user_code

GONE: Any = object()
"""In the place of what was there, and is no more."""
ABSENT: Any = object()
"""In the place of what was not there."""
_BYTES_EACH = 16
_MOST_TURNS = 200
_MOST_ADDED = 25_000
"""Items that are added in all turns, twice each: a large set is put back in the order that it happens to get."""


class State(list[Any]):
    """What was taken out of an object and nobody else knows: there is nothing to look at in it."""


LEAVES = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, object}
    | {torch.Size, torch.dtype, torch.device, torch.layout, State}
)
"""Types of objects that never change, and hold nothing."""


def _nothing(*_: object) -> tuple[()]:
    return ()


@dataclass(frozen=True, eq=False)
class Kind:
    """One way to look at an object: `read` gives the parts that it holds, `write` puts parts in their place.

    No code of the object's own runs for that: subclasses may count, log or refuse in their methods.
    """

    read: Callable[[Any], list[Any] | None]
    """None where it cannot be read, now or ever."""
    write: Callable[[Any, list[Any]], object] = _nothing
    """Parts may be `GONE`. Nothing is written where nothing changed, and all of it can be done twice."""
    also: Callable[[Any], Iterable[object]] = _nothing
    """What it leads to besides its parts."""
    cost_bytes: Callable[[Any], int] = lambda _value: 0
    """About how much memory its parts take."""


def hashes_by_itself(key: Any) -> bool:
    """Whether a dict can be asked for it without a call of a `__hash__` or an `__eq__` of the user's."""
    kind: Any = type(key)
    if kind in LEAVES:
        return True
    if issubclass(kind, (tuple, frozenset)) and not all(map(hashes_by_itself, key)):
        return False
    return not any(isinstance(method, FunctionType) and is_user_code(method.__code__) for method in (kind.__hash__, kind.__eq__))


def same(now: list[Any], parts: list[Any]) -> bool:
    """Whether both are the very same objects."""
    return len(now) == len(parts) and all(map(operator.is_, now, parts))


def as_one(write: Callable[[Any, list[Any]], object], read: Callable[[Any], list[Any]]) -> Callable[[Any, list[Any]], None]:
    """All of it is there and something changed, or nothing is written."""

    def checked(value: Any, parts: list[Any]) -> None:
        if not any(part is GONE for part in parts) and not same(read(value), parts):
            write(value, parts)

    return checked


def _container(base: Any, write: Callable[[Any, list[Any]], object]) -> Kind:
    def read(value: Any) -> list[Any]:
        return list(base.__iter__(value))

    return Kind(read, as_one(write, read), cost_bytes=lambda value: _BYTES_EACH * base.__len__(value))


def _write_list(value: list[Any], parts: list[Any]) -> None:
    list.__setitem__(value, slice(None), parts)


def _write_deque(value: deque[Any], parts: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, parts)


def _write_set(value: set[Any], parts: list[Any]) -> None:
    """In the order that it had, where an order of adding leads to it: items whose hashes collide stand as they came."""
    _rewind(value, len(parts))
    most = min(_MOST_TURNS, _MOST_ADDED // (len(parts) or 1)) if all(map(hashes_by_itself, parts)) else 1
    for order in itertools.islice(_orders(parts), max(1, most)):
        for room_for in ([], order):  # a table that has grown item by item is another than one that was made for all of them
            set.clear(value)
            set.update(value, dict.fromkeys(room_for))
            for part in order:
                set.add(value, part)
            if same(list(set.__iter__(value)), parts):
                return


def _orders(parts: list[Any]) -> Iterator[list[Any]]:
    """As they stood, begun elsewhere, the other way round, then by chance."""
    for order in (parts, parts[::-1]):
        yield from ([*order[start:], *order[:start]] for start in range(max(1, len(parts))))
    chance = random.Random(0)  # noqa: S311  # of its own: the user's numbers stay where they are
    while True:
        yield chance.sample(parts, len(parts))


def _rewind(value: set[Any], size: int) -> None:
    """`pop` begins to look behind the place from which it took last: let that be the last one of a table larger than any of that size."""
    last = (1 << (8 * (size + 1)).bit_length()) - 1
    set.clear(value)
    set.update(value, range(last // 2), (last,))
    for number in range(last // 2):
        set.discard(value, number)
    set.pop(value)


# --- dicts: keys and values in turns; what is gone leaves what stands in its place -------------------------------------------------


def _base_of(value: dict[Any, Any]) -> Any:
    return OrderedDict if issubclass(type(value), OrderedDict) else dict


def _read_dict(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in list(_base_of(value).items(value)) for part in pair]


def _write_dict(value: dict[Any, Any], parts: list[Any]) -> None:
    now = _read_dict(value)
    if same(now, parts):
        return
    base = _base_of(value)
    present = dict(zip(now[::2], now[1::2], strict=True))
    kept = {key: item for key, item in zip(parts[::2], parts[1::2], strict=True) if key is not GONE}
    wanted = {key: present.get(key, GONE) if item is GONE else item for key, item in kept.items()}
    wanted = {key: item for key, item in wanted.items() if item is not GONE}
    if not same(list(wanted), list(present)):
        base.clear(value)
    for key, item in wanted.items():
        base.__setitem__(value, key, item)


DICT = Kind(_read_dict, _write_dict, cost_bytes=lambda value: 2 * _BYTES_EACH * dict.__len__(value))
SET = _container(set, _write_set)
CONTAINERS: dict[type, Kind] = {
    dict: DICT,
    OrderedDict: DICT,  # the tables of hooks that each module has: their own attributes are nobody's
    set: SET,
    list: _container(list, _write_list),
    deque: _container(deque, _write_deque),
    tuple: _container(tuple, _nothing),
}
EMPTY = {kind: [(way, list[Any]())] for kind, way in CONTAINERS.items()}
"""How one that holds nothing is looked at, once for all of its type: each module has about ten empty tables of hooks."""
