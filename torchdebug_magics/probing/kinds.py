"""How plain Python objects are read and written without a call of code that the user wrote."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

__all__ = ["ATTRIBUTES", "CONTAINERS", "GONE", "HEAP_TYPE", "LEAVES", "POSITION", "RANDOM", "Kind", "attributes_of", "members_of", "same"]

HEAP_TYPE = 1 << 9
"""A flag of types that were made by a `class` statement, or could have been."""
GONE: Any = object()
"""In the place of what is no more."""


class State(list[Any]):
    """A state that was taken out of an object, which nobody else knows."""


LEAVES = frozenset(
    {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        type(None),
        type(...),
        range,
        type,
        torch.Size,
        torch.dtype,
        torch.device,
        State,
    }
)
"""Types of objects that never change, and hold nothing."""


@dataclass(frozen=True)
class Kind:
    """One way to look at an object: `read` gives the parts that it holds, `write` puts parts in their place."""

    size: Callable[[Any], int]
    read: Callable[[Any], list[Any] | None]
    """None where it cannot be read, now or ever."""
    write: Callable[[Any, list[Any]], None]
    """Parts may be `GONE`. Nothing is written where nothing changed."""
    make: Callable[[type, list[Any]], Any] | None = None
    """An object like the one that is no more; a container is made empty."""


def _hashes_by_itself(key: Any) -> bool:
    """Whether a dict can be asked for it without a call of the user's `__hash__`."""
    kind: Any = type(key)
    if kind is tuple:
        return all(map(_hashes_by_itself, key))
    return kind in LEAVES or kind.__hash__ is object.__hash__ or issubclass(kind, (torch.Tensor, type))


def same(now: list[Any], parts: list[Any]) -> bool:
    """Whether both are the very same objects."""
    return len(now) == len(parts) and all(one is other for one, other in zip(now, parts, strict=True))


def _is_whole(parts: list[Any]) -> bool:
    return not any(part is GONE for part in parts)


def attributes_of(value: object) -> dict[str, Any] | None:
    """Its own attributes. A `__dict__` that is a property of the user's is not asked."""
    for base in type(value).__mro__:
        if "__dict__" in vars(base):
            getter = vars(base)["__dict__"]
            held = getter.__get__(value) if type(getter) in {GetSetDescriptorType, MemberDescriptorType} else None
            return held if isinstance(held, dict) else None
    return None


# --- sequences and sets: all of it is there, or nothing is written ----------------------------------------------------------------


def _read_list(value: list[Any]) -> list[Any]:
    return list.__getitem__(value, slice(None))


def _write_list(value: list[Any], parts: list[Any]) -> None:
    if _is_whole(parts) and not same(_read_list(value), parts):
        list.__setitem__(value, slice(None), parts)


def _read_deque(value: deque[Any]) -> list[Any]:
    return list(deque.__iter__(value))


def _write_deque(value: deque[Any], parts: list[Any]) -> None:
    if _is_whole(parts) and not same(_read_deque(value), parts):
        deque.clear(value)
        deque.extend(value, parts)


def _read_set(value: set[Any]) -> list[Any] | None:
    items = list(set.__iter__(value))
    return items if all(map(_hashes_by_itself, items)) else None


def _write_set(value: set[Any], parts: list[Any]) -> None:
    now = _read_set(value)
    if _is_whole(parts) and now is not None and set(map(id, now)) != set(map(id, parts)):
        set.clear(value)
        set.update(value, parts)


# --- dicts: keys and values in turns; what is gone leaves what stands in its place -------------------------------------------------


def _base_of(value: dict[Any, Any]) -> Any:
    return OrderedDict if issubclass(type(value), OrderedDict) else dict


def _read_dict(value: dict[Any, Any]) -> list[Any] | None:
    pairs = list(_base_of(value).items(value))
    return [part for pair in pairs for part in pair] if all(_hashes_by_itself(key) for key, _ in pairs) else None


def _write_dict(value: dict[Any, Any], parts: list[Any]) -> None:
    now = _read_dict(value)
    if now is None or same(now, parts):
        return
    base = _base_of(value)
    present = dict(zip(now[::2], now[1::2], strict=True))
    held = {
        key: present.get(key, GONE) if item is GONE else item for key, item in zip(parts[::2], parts[1::2], strict=True) if key is not GONE
    }
    wanted = {key: item for key, item in held.items() if item is not GONE}
    if list(map(id, wanted)) != list(map(id, present)):
        base.clear(value)
    for key, item in wanted.items():
        base.__setitem__(value, key, item)


# --- attributes: a dict, and what `__slots__` names ---------------------------------------------------------------------------------


def members_of(kind: type) -> list[Any]:
    """What its `__slots__` name, in the order of its bases."""
    return [
        member
        for base in kind.__mro__
        if base.__flags__ & HEAP_TYPE
        for member in vars(base).values()
        if type(member) is MemberDescriptorType
    ]


def _read_member(member: Any, value: object) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return GONE


def _read_attributes(value: object) -> list[Any] | None:
    names = _read_dict(attributes_of(value) or {})
    return None if names is None else [*(_read_member(member, value) for member in members_of(type(value))), *names]


def _write_attributes(value: object, parts: list[Any]) -> None:
    members, held = members_of(type(value)), attributes_of(value)
    for member, part in zip(members, parts, strict=False):
        if part is not GONE and _read_member(member, value) is not part:
            member.__set__(value, part)
    if held is not None:
        _write_dict(held, parts[len(members) :])


# --- what has a state instead of parts ------------------------------------------------------------------------------------------------


def _read_random(value: Any) -> list[Any]:
    if isinstance(value, random.Random):
        return [State([value.getstate()])]
    return [State([value.get_state() if isinstance(value, torch.Generator) else value.bit_generator.state])]


def _write_random(value: Any, parts: list[Any]) -> None:
    (state,) = parts[0]
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.bit_generator.state = state


def _read_position(value: Any) -> list[Any] | None:
    try:
        return [value.tell()] if value.seekable() else None
    except (OSError, ValueError):  # closed, or read by an iterator
        return None


def _write_position(value: Any, parts: list[Any]) -> None:
    if _read_position(value) != parts:
        value.seek(parts[0])


_TUPLE = Kind(len, lambda value: list(tuple.__iter__(value)), lambda _value, _parts: None, tuple.__new__)
CONTAINERS: tuple[tuple[type, Kind], ...] = (
    (list, Kind(list.__len__, _read_list, _write_list, lambda kind, _parts: [] if kind is list else GONE)),
    (dict, Kind(dict.__len__, _read_dict, _write_dict, lambda kind, _parts: {} if kind is dict else GONE)),
    (tuple, _TUPLE),
    (set, Kind(set.__len__, _read_set, _write_set)),
    (deque, Kind(deque.__len__, _read_deque, _write_deque)),
)
ATTRIBUTES = Kind(lambda value: len(attributes_of(value) or ()), _read_attributes, _write_attributes)
RANDOM = Kind(lambda _value: 1, _read_random, _write_random)
POSITION = Kind(lambda _value: 1, _read_position, _write_position)
