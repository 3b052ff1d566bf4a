"""What stands in some places, with all that is in it: kept for the length of a step, put back later into the very same objects.

Only plain objects are looked into, and no number in a tensor is touched. What is not plain is not held, nor is what it is in: that a
state is kept must not keep an activation alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CellType
from typing import TYPE_CHECKING, Any, TypeAlias

from torchdebug_magics.probing.attributes import Names
from torchdebug_magics.probing.kinds import GONE, same
from torchdebug_magics.probing.plain_values import is_leaf, plain_ways_of
from torchdebug_magics.probing.snapshot import Bound, Faces, reachable, write_back

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Place", "WeakSnapshot"]

Place: TypeAlias = Names | CellType
_EACH_STEP = Bound(objects=10_000, bytes=16 << 10, levels=12)
"""Little is kept at each step: the log of a long run would cost more than it is worth."""


@dataclass(eq=False)
class _Held:
    """One object, and what it held."""

    identity: int
    type: type
    faces: Faces
    pointer: Callable[[], Any]
    """Gives the object; None where it is no more, or was not to be held."""
    holders: list[_Held] = field(default_factory=list)


class WeakSnapshot:
    """What stood in some places at one moment, and what it held."""

    def __init__(self, places: Iterable[Place], bound: Bound = _EACH_STEP) -> None:
        self._places = list(places)
        found = _plain_in(self._places, bound)
        self._held = {id(value): _Held(id(value), type(value), faces, _nothing) for value, faces in found}
        values = {id(value): value for value, _ in found}
        for held in list(self._held.values()):
            for _, parts in held.faces:
                for place, part in enumerate(parts):
                    parts[place] = self._hold(part, held, values)
        mine = set(map(id, self._places))
        weak = _with_holders([held for held in self._held.values() if not held.faces]) - mine
        for held in self._held.values():
            held.pointer = (_weakly if held.identity in weak else _strongly)(values[held.identity])
            held.holders.clear()  # else all would hold each other, and what they hold, until the next collection

    def _hold(self, part: object, holder: _Held, values: dict[int, Any]) -> Any:
        if is_leaf(part):
            return part
        held = self._held.setdefault(id(part), _Held(id(part), type(part), [], _nothing))
        held.holders.append(holder)
        values[id(part)] = part
        return held

    @property
    def reached(self) -> list[object]:
        """What `put_back` writes, as far as it still is: to keep what is there now before that."""
        objects = [value for held in self._held.values() if held.faces and (value := held.pointer()) is not None]
        return [*self._places, *objects]

    def put_back(self, guard: Guard) -> None:
        """Make all of it as it was; what is no more is left; what resists, too, and is noted."""
        now = _Now(self._places)
        written = [
            (owner, [(kind, now.values(parts)) for kind, parts in held.faces])
            for held in self._held.values()
            if held.faces and (owner := now.value_of(held)) is not GONE
        ]
        for owner, faces in written:
            write_back(owner, faces, guard)


class _Now:
    """The objects of a snapshot, in the present: held, found again, or made anew."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._reachable: dict[int, Any] | None = None
        self._known: dict[int, Any] = {}

    def value_of(self, held: _Held) -> Any:
        if held.identity not in self._known:
            value = held.pointer()
            self._known[held.identity] = value if value is not None else self._find(held)
            if self._known[held.identity] is GONE:
                self._make(held)
        return self._known[held.identity]

    def values(self, parts: list[Any]) -> list[Any]:
        return [self.value_of(part) if isinstance(part, _Held) else part for part in parts]

    def _find(self, held: _Held) -> Any:
        """What is reachable now and was known by the same id: no other list can be told to be that list."""
        if self._reachable is None:
            found = _plain_in(self._places, Bound())
            self._reachable = {id(value): value for value, _ in found}
            self._reachable.update((id(part), part) for _, faces in found for _, parts in faces for part in parts)
        value = self._reachable.get(held.identity, GONE)
        if type(value) is not held.type or (issubclass(held.type, tuple) and not self._is_still(value, held)):
            return GONE
        return value

    def _is_still(self, found: Any, held: _Held) -> bool:
        return all(same([*tuple.__iter__(found)], self.values(parts)) for _, parts in held.faces[:1])

    def _make(self, held: _Held) -> None:
        """A tuple like the one that is no more; a list or a dict is made empty, to be filled as any other."""
        values = self.values(held.faces[0][1]) if len(held.faces) == 1 else [GONE]
        if any(value is GONE for value in values):
            return
        if issubclass(held.type, tuple):
            self._known[held.identity] = tuple.__new__(held.type, values)
        elif held.type is list or held.type is dict:
            self._known[held.identity] = held.type()


def _plain_in(places: Iterable[Place], bound: Bound) -> list[tuple[Any, Faces]]:
    return reachable(places, lambda value: [] if is_leaf(value) else plain_ways_of(value), bound, whole=True)


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
