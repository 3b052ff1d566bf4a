"""What a second run cannot find as the first one did: generators that ran, iterators over what has no places, the order of a set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from types import GeneratorType
from typing import Any

from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.kinds import same
from torchdebug_magics.probing.referents import referents
from torchdebug_magics.probing.ways import ways_of
from torchdebug_magics.probing.where import local_values

__all__ = ["Leftovers"]

_DEEPEST = 4


class Leftovers:
    """How far every iterator and queue is that some variables lead to, and in which order sets stand; to be asked back at the start."""

    def __init__(self, variables: Mapping[str, object], is_found_again: Callable[[object], bool] = lambda _: False) -> None:
        found = ((name, one) for name, value in variables.items() for one in _iterators(value) if not is_found_again(one))
        self._places = [(name, one, _place(one)) for name, one in found]
        self._sets = [(name, value, list(value)) for name, value in variables.items() if type(value) is set]

    def names(self) -> tuple[str, ...]:
        """What is not where it was, such as ``the iterator `batches` ``."""
        gone = (_called(name, one) for name, one, place in self._places if _place(one) != place)
        turned = (f"the order of the set `{name}`" for name, value, before in self._sets if not same(list(value), before))
        return tuple(dict.fromkeys((*gone, *turned)))

    def at_risk(self) -> tuple[str, ...]:
        """What could not be put back, should a run take from it."""
        return tuple(dict.fromkeys(_called(name, one) for name, one, _ in self._places if not _has_places(one)))


def _called(name: str, one: object) -> str:
    return f"the {'queue' if isinstance(one, SimpleQueue) else 'iterator'} `{name}`"


def _iterators(value: object, depth: int = 0) -> Iterator[Any]:
    """The iterators in a value, and those that they take from."""
    if depth >= _DEEPEST:
        return
    kind = type(value)
    if kind in {list, tuple, dict} and depth < _DEEPEST - 1:
        for one in list(value.values() if isinstance(value, dict) else value)[:64]:  # type: ignore[call-overload]  # a list or a tuple
            if hasattr(type(one), "__next__") or type(one) is SimpleQueue:
                yield from _iterators(one, depth + 1)
    if kind is not SimpleQueue and (not hasattr(kind, "__next__") or hasattr(kind, "read")):
        return
    yield value
    held = attributes_of(value)
    inside = referents(value) if held is None and kind is not GeneratorType else (held or {}).values()
    for one in list(inside):
        yield from _iterators(one, depth + 1)


def _place(iterator: Any) -> object:
    """How far it is; None where that cannot be told."""
    if isinstance(iterator, SimpleQueue):
        return iterator.qsize()
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, _Same(local_values(frame)))
    if attributes_of(iterator) is not None:
        return None  # one of Python's own making: what it takes from is looked at by itself
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced = iterator.__reduce__()
    except (TypeError, AttributeError):
        return None
    return tuple(part for part in reduced[1:] if isinstance(part, int)), tuple(part for part in reduced[1] if isinstance(part, int))


class _Same:
    """Variables that hold the very same objects; a loop stands at the same place of its code each time round."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held  # keeps them alive, so that no other object gets the address of one

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._held.keys() != other._held.keys():
            return False
        return all(one is other._held[name] for name, one in self._held.items())

    __hash__ = None  # type: ignore[assignment]  # nobody looks one up


def _has_places(iterator: Any) -> bool:
    return attributes_of(iterator) is not None or any(way.read(iterator) for way in ways_of(iterator))
