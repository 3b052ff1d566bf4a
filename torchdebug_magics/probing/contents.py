"""What plain Python objects hold, with all that is in them: kept at one moment, put back later into the very same objects.

No code of the user's is called, and no number in a tensor is touched. What is not plain is not held, nor is what it is in: that a
state is kept must not keep an activation alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torchdebug_magics.probing.kinds import GONE, Kind, same
from torchdebug_magics.probing.plain import is_leaf, kinds_of

__all__ = ["Contents"]

_DEEPEST = 12
_MOST_ITEMS = 1 << 20
_Faces = list[tuple[Kind, list[Any]]]
"""What an object held, by each way to look at it."""


@dataclass(eq=False)
class _Held:
    """One object, and what it held."""

    identity: int
    type: type
    faces: _Faces
    pointer: Callable[[], Any]
    """Gives the object; None where it is no more, or was not to be held."""
    holders: list[_Held] = field(default_factory=list)


class Contents:
    """What some objects, and the objects in them, hold now.

    `alive` holds them all, for the length of a replay: what is then taken out of a container is sure to be there to be put back.
    """

    def __init__(self, roots: Iterable[object], *, alive: bool = False, deepest: int = _DEEPEST, most: int = _MOST_ITEMS) -> None:
        roots = list(roots)
        found = _reachable(roots, deepest, most)
        self._held: dict[int, _Held] = {}
        values: dict[int, object] = {}
        for value, faces in found:
            self._held[id(value)] = _Held(id(value), type(value), faces, _nothing)
            values[id(value)] = value

        def hold(value: object) -> Any:
            if is_leaf(value):
                return value
            held = self._held.get(id(value))
            if held is None:
                held = self._held[id(value)] = _Held(id(value), type(value), [], _nothing)
                values[id(value)] = value
            return held

        for held in list(self._held.values()):
            for _, parts in held.faces:
                for place, part in enumerate(parts):
                    parts[place] = kept = hold(part)
                    if isinstance(kept, _Held):
                        kept.holders.append(held)
        self._roots = [hold(root) for root in roots]
        not_plain = [held for held in self._held.values() if not held.faces]
        weak = set() if alive else _with_holders(not_plain)
        for held in self._held.values():
            held.pointer = (_weakly if held.identity in weak else _strongly)(values[held.identity])

    def put_back(self, *present: object) -> list[Any]:
        """Write everything back, and give the roots, `GONE` for one that is no more. `present` is what stands in their places now."""
        now = _Now(present)
        for held in self._held.values():
            owner = now.value_of(held) if held.faces else GONE
            if owner is not GONE:
                for kind, parts in held.faces:
                    kind.write(owner, now.values(parts))
        return now.values(self._roots)

    def objects(self) -> list[object]:
        """The objects that would be written, as far as they are held."""
        return [value for held in self._held.values() if held.faces and (value := held.pointer()) is not None]


class _Now:
    """The objects of a `Contents`, in the present: held, found again, or made anew."""

    def __init__(self, roots: Iterable[object]) -> None:
        self._roots = list(roots)
        self._reachable: dict[int, object] | None = None
        self._known: dict[int, Any] = {}

    def value_of(self, held: _Held) -> Any:
        if held.identity not in self._known:
            value = held.pointer()
            self._known[held.identity] = value if value is not None else self._find(held)
            if self._known[held.identity] is GONE:
                self._make(held)
        return self._known[held.identity]

    def _find(self, held: _Held) -> Any:
        """What is reachable now and was known by the same id: no other list can be told to be that list."""
        if self._reachable is None:
            self._reachable = {id(value): value for value in self._roots}
            for value, faces in _reachable(self._roots, _DEEPEST, _MOST_ITEMS):
                self._reachable[id(value)] = value
                self._reachable.update((id(part), part) for _, parts in faces for part in parts)
        found = self._reachable.get(held.identity, GONE)
        if type(found) is not held.type or (issubclass(held.type, tuple) and not self._is_still(found, held)):
            return GONE
        return found

    def _is_still(self, found: Any, held: _Held) -> bool:
        return all(same([*tuple.__iter__(found)], self.values(parts)) for kind, parts in held.faces if kind.make is not None)

    def values(self, parts: list[Any]) -> list[Any]:
        return [self.value_of(part) if isinstance(part, _Held) else part for part in parts]

    def _make(self, held: _Held) -> None:
        if len(held.faces) == 1:
            (kind, parts) = held.faces[0]
            values = self.values(parts)
            if kind.make is not None and not any(value is GONE for value in values):
                self._known[held.identity] = kind.make(held.type, values)


def _reachable(roots: Iterable[object], deepest: int, most: int) -> list[tuple[object, _Faces]]:
    """Plain objects and what they hold, the nearest first; what is too deep or too large is left out."""
    found: dict[int, tuple[object, _Faces]] = {}
    level = list(roots)
    for _ in range(deepest):
        further: list[object] = []
        for value in level:
            if id(value) in found or is_leaf(value):
                continue
            faces: _Faces = []
            for kind in kinds_of(value):
                size = 1 + kind.size(value)
                parts = kind.read(value) if size <= most else None
                if parts is None:
                    faces = []
                    break
                faces.append((kind, parts))
                most -= size
            if faces:
                found[id(value)] = value, faces
                further += [part for _, parts in faces for part in parts if not is_leaf(part)]
        level = further
    return list(found.values())


def _with_holders(start: list[_Held]) -> set[int]:
    """The ids of some objects, of those they are in, and so on."""
    found: set[int] = set()
    todo = list(start)
    while todo:
        one = todo.pop()
        if one.identity not in found:
            found.add(one.identity)
            todo += one.holders
    return found


def _nothing() -> None:
    return None


def _strongly(value: object) -> Callable[[], Any]:
    return lambda: value


def _weakly(value: object) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return _nothing
