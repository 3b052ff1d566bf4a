"""What containers hold, and the names of the places in them. Only methods of the built-in type run, never those of a subclass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

__all__ = ["CONTAINERS", "PLACES", "Named", "place"]

Named: TypeAlias = Iterator[tuple[str, object]]
"""(how it is written behind the holder's name, what is held)."""

_WORDS = (str, int, float, bool, bytes, type(None))
_LONGEST = 40


def place(key: object) -> str:
    """``['loss']``, ``[3]``; ``[...]`` where to show the key would run code of the user's, or would be long."""
    plain = type(key) in _WORDS or (type(key) is tuple and all(type(item) in _WORDS for item in key))
    text = repr(key) if plain else "..."
    return f"[{text}]" if len(text) <= _LONGEST else "[...]"


def _in_dict(value: dict[Any, Any]) -> Iterable[object]:
    for key, item in dict.items(value):
        yield item
        yield key


def _names_in_dict(value: dict[Any, Any]) -> Named:
    for key, item in dict.items(value):
        yield place(key), item
        yield ".<key>", key


def _by_position(base: Any) -> Callable[[Any], Named]:
    def names(value: Any) -> Named:
        return ((f"[{position}]", item) for position, item in enumerate(base.__iter__(value)))

    return names


def _unordered(base: Any) -> Callable[[Any], Named]:
    return lambda value: (("{...}", item) for item in base.__iter__(value))


CONTAINERS: Mapping[type, Callable[[Any], Iterable[object]]] = {
    dict: _in_dict,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
"""By the very type: what is held in it."""

PLACES: Mapping[type, Callable[[Any], Named]] = {
    dict: _names_in_dict,
    **{base: _by_position(base) for base in (list, tuple, deque)},
    **{base: _unordered(base) for base in (set, frozenset)},
}
"""By the type or one of its bases: the names of the places."""
