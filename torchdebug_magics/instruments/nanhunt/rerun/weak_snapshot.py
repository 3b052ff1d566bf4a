"""What stands in some places, with all that is in it: kept for the length of a step, put back later into the very same objects.

Only plain objects are looked into, and no number in a tensor is touched. What is not plain is not held, nor is what it is in: that a
state is kept must not keep an activation alive.
"""

from __future__ import annotations

import ast
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch

from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.syntax import names_in
from torchdebug_magics.probing.source.user_code import called_from, is_of_module, is_user_code, local_values, owner, writes_of
from torchdebug_magics.probing.state.attributes import CELL, HEAP_TYPE, INSTANCE, NAMES, Names, attributes_of, members_of
from torchdebug_magics.probing.state.kinds import ABSENT, CONTAINERS, DICT, GONE, LEAVES, SET, Kind, hashes_by_itself, same
from torchdebug_magics.probing.state.snapshot import Bound, Faces, reachable, write_back
from torchdebug_magics.probing.state.states import STATES, is_generator, of_numpy, ways_of

Namespace: TypeAlias = Names | CellType
_EACH_STEP = Bound(objects=10_000, bytes=16 << 10, levels=12)
"""Little is kept at each step: the log of a long run would cost more than it is worth."""
_PLAIN = frozenset({*CONTAINERS.values(), *STATES.values(), CELL, NAMES})
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


@dataclass(eq=False)
class _Held:
    """One object, and what it held."""

    identity: int
    type: type
    faces: Faces
    pointer: Callable[[], Any] = lambda: None
    """Gives the object; None where it is no more, or was not to be held."""
    holders: list[_Held] = field(default_factory=list)


class WeakSnapshot:
    """What stood in some places at one moment, and what it held."""

    def __init__(self, places: Iterable[Namespace], bound: Bound = _EACH_STEP) -> None:
        self._places = list(places)
        plain = _plain_in(self._places, bound)
        self._held = {id(value): _Held(id(value), type(value), faces) for value, faces in plain}
        values = {id(value): value for value, _ in plain}
        for held in list(self._held.values()):
            for _, parts in held.faces:
                for place, part in enumerate(parts):
                    parts[place] = self._hold(part, held, values)
        mine = set(map(id, self._places))
        weak = _with_holders([held for held in self._held.values() if not held.faces]) - mine
        for held in self._held.values():
            held.pointer = _pointer(values[held.identity], weak=held.identity in weak)
            held.holders.clear()  # else all would hold each other, and what they hold, until the next collection

    def _hold(self, part: object, holder: _Held, values: dict[int, Any]) -> Any:
        if is_leaf(part):
            return part
        held = self._held.setdefault(id(part), _Held(id(part), type(part), []))
        held.holders.append(holder)
        values[id(part)] = part
        return held

    @property
    def reached(self) -> list[object]:
        """What `put_back` writes, as far as it still is: to keep what is there now before that."""
        objects = [value for held in self._held.values() if held.faces and (value := held.pointer()) is not None]
        return [*self._places, *objects]

    def put_back(self, guard: Guard, without: frozenset[int] = frozenset()) -> None:
        """Make all of it as it was, `without` the objects of these ids; what is no more is left; what resists, too, and is noted."""
        now = _Now(self._places)
        written = [
            (owner, [(kind, now.values(parts)) for kind, parts in held.faces])
            for held in self._held.values()
            if held.faces and (owner := now.value_of(held)) is not GONE
        ]
        for owner, faces in written:
            if id(owner) not in without:
                write_back(owner, faces, guard)


class _Now:
    """The objects of a snapshot, in the present: held, found again, or made anew."""

    def __init__(self, places: list[Namespace]) -> None:
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
            plain = _plain_in(self._places, Bound())
            self._reachable = {id(value): value for value, _ in plain}
            self._reachable.update((id(part), part) for _, faces in plain for _, parts in faces for part in parts)
        value = self._reachable.get(held.identity, GONE)
        if type(value) is not held.type:
            return GONE
        stands: Any = value
        parts = [self.values(parts) for _, parts in held.faces[:1]]
        other = issubclass(held.type, tuple) and not all(same([*tuple.__iter__(stands)], part) for part in parts)
        return GONE if other else value

    def _make(self, held: _Held) -> None:
        """A tuple like the one that is no more."""
        values = self.values(held.faces[0][1]) if len(held.faces) == 1 else [GONE]
        if any(value is GONE for value in values):
            return
        if issubclass(held.type, tuple):
            self._known[held.identity] = tuple.__new__(held.type, values)


def _plain_in(places: Iterable[Namespace], bound: Bound) -> list[tuple[Any, Faces]]:
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


def _pointer(value: object, *, weak: bool) -> Callable[[], Any]:
    try:
        return weakref.ref(value) if weak else lambda: value
    except TypeError:
        return lambda: None


def is_leaf(value: Any) -> bool:
    """Whether nothing in it is to be looked at, and no tensor is in it."""
    kind: Any = type(value)
    if kind in LEAVES or value is GONE or value is ABSENT:
        return True
    if kind is tuple or kind is frozenset:
        return all(type(item) in LEAVES for item in value)
    if kind.__module__ == "numpy":
        return not (kind.__name__ == "ndarray" and value.dtype.hasobject)
    return issubclass(kind, type)


def plain_ways_of(value: object) -> list[Kind]:
    """All ways to look at an object; none for one that is not plain."""
    ways = ways_of(value)
    return ways if all(_is_plain(value, way) for way in ways) else []


def _is_plain(value: Any, way: Kind) -> bool:
    if way is INSTANCE:
        is_bare = way is not ways_of(value)[0] and not attributes_of(value) and not members_of(type(value))
        return is_bare or _has_plain_attributes(value)
    if way is DICT or way is SET:
        return all(map(hashes_by_itself, (dict if way is DICT else set).__iter__(value)))
    return way in _PLAIN or (type(value).__module__.startswith("numpy.random") and way is of_numpy(value))


def _has_plain_attributes(value: object) -> bool:
    """An object of the user's, or an installed one of nothing but plain values: any other may have a life that is not in its attributes."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if kind.__module__.partition(".")[0] == "torch" or issubclass(kind, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        return False
    whose = _whose(kind)
    if whose == "library":
        attributes = attributes_of(value)
        return attributes is not None and all(map(is_leaf, attributes.values()))
    return whose == "user" and (attributes_of(value) is not None or bool(members_of(kind)))


def _whose(kind: type) -> str:
    name = kind.__module__
    if not isinstance(name, str) or not kind.__flags__ & HEAP_TYPE:
        return "python"
    if name.partition(".")[0] in sys.stdlib_module_names and name not in {"__main__", "builtins"}:
        return "python"
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__") if name != "__main__" else None
    return owner(file) if isinstance(file, str) else "user"


# Which names are written is read from the bytecode, once a function, so that taking the state costs next to nothing for code that keeps
# none.
def places_of(modules: Iterable[torch.nn.Module], callers: Iterable[FrameType] = ()) -> list[Namespace]:
    """The places that forwards of `modules`, and functions named in the code of `callers`, may write, as far as their code shows.

    With the generators of random numbers that `callers` name: who draws from one writes it.
    """
    found, callers = _Found(), list(callers)
    drawn = dict(enumerate(generator for caller in callers for generator in _generators_of(caller)))
    found.add({str(number): generator for number, generator in drawn.items()}, map(str, drawn))
    functions = [
        value
        for caller in callers
        for name in writes_of(caller.f_code).loaded
        if isinstance(value := caller.f_globals.get(name), FunctionType)
    ]
    for module in modules:
        methods = _methods(type(module))
        functions += methods
        held = module.__dict__
        for method in methods:
            writes = writes_of(method.__code__)
            if method.__name__ != "__init__":
                found.add(held, writes.attributes)
            loaded = (writes.loaded_attributes & held.keys()) - _OF_EVERY_MODULE
            found.add(held, (name for name in loaded if _is_container(held[name]) or is_generator(held[name])))
    for function in functions:
        for called in called_from(function):
            found.add_outside(called)
    return found.places()


def iterators_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[str]:
    """Names of running iterators that functions called by the statements may take from: what they took would be lost."""
    found: list[str] = []
    for name in sorted(names_in(*statements)):
        for called in called_from(names.get(name)):
            held = called.__globals__
            loaded = writes_of(called.__code__).loaded & held.keys()
            found += [name for name in loaded if hasattr(type(held[name]), "__next__") and not hasattr(type(held[name]), "read")]
    return found


class _Found:
    """Places, each namespace once."""

    def __init__(self) -> None:
        self._names: defaultdict[int, set[str]] = defaultdict(set)
        self._owners: dict[int, dict[str, Any] | type] = {}
        self._cells: dict[int, CellType] = {}

    def add(self, owner: dict[str, Any] | type, names: Iterable[str]) -> None:
        self._owners[id(owner)] = owner
        self._names[id(owner)].update(names)

    def add_outside(self, function: FunctionType) -> None:
        """What one function writes outside itself: globals, what it closes over, containers that it names, attributes that it stores."""
        writes, names = writes_of(function.__code__), function.__globals__
        self.add(names, writes.stored_globals)
        self._cells.update((id(cell), cell) for cell in function.__closure__ or ())
        for name in writes.loaded & names.keys():
            value = names[name]
            if is_generator(value) or (_is_container(value) and value is not names):
                self.add(names, [name])
            elif isinstance(value, type):
                self.add(value, writes.attributes & vars(value).keys())
            elif not isinstance(value, (torch.Tensor, torch.nn.Module, ModuleType, FunctionType)):
                held = attributes_of(value) or {}
                self.add(held, writes.attributes & held.keys())

    def places(self) -> list[Namespace]:
        named = [Names(owner, frozenset(self._names[key])) for key, owner in self._owners.items() if self._names[key]]
        return [*named, *self._cells.values()]


def _methods(kind: type) -> list[FunctionType]:
    return [
        method
        for one in kind.__mro__
        for method in vars(one).values()
        if isinstance(method, FunctionType) and is_user_code(method.__code__)
    ]


def _generators_of(caller: FrameType) -> Iterator[object]:
    """In variables, and in attributes of what is in variables."""
    names = caller.f_globals
    local = {} if is_of_module(caller) else local_values(caller)
    for value in (*local.values(), *(names[name] for name in writes_of(caller.f_code).loaded & names.keys())):
        held = {} if issubclass(type(value), (type, ModuleType, FunctionType)) else attributes_of(value) or {}
        yield from filter(is_generator, (value, *held.values()))


def _is_container(value: object) -> bool:
    return issubclass(type(value), (list, dict, set, deque))
