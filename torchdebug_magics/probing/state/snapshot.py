"""The state of a program: everything of the user's that code can reach from some objects, as it is now, and back again.

Code that runs once more must leave no trace in what it only happens to touch: counters, lists, queues, files, whatever a hook fills.
Which of them it will touch cannot be told beforehand, so all is kept that can be reached, nearest first, while there is room; with it
gradients, random generators and settings of the process. What tensors hold is kept in `Snapshot.contents`, by whoever knows which of
them are written; where nobody does, `KeptState` copies it. What leaves the process, a line written to a file or a request, is the matter
of `probing.outside`.

A snapshot that is taken at each step of a training looks only into plain objects, and keeps nothing else alive, nor what holds it: no
activation lives longer because of it.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.outside.effects import Effects
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.attributes import CELL, INSTANCE, NAMES, attributes_of, members_of, undisturbed, whose
from torchdebug_magics.probing.state.contents import Contents
from torchdebug_magics.probing.state.kinds import ABSENT, CONTAINERS, EMPTY, GONE, LEAVES, Kind, same
from torchdebug_magics.probing.state.process_settings import ProcessSettings
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.states import STATES, of_numpy, ways_of

T = TypeVar("T")
Faces: TypeAlias = list[tuple[Kind, list[Any]]]
"""What an object held, by each way to look at it."""
_PLAIN = frozenset({*CONTAINERS.values(), *STATES.values(), CELL, NAMES})


@dataclass(frozen=True)
class Bound:
    """How much is looked at."""

    objects: int = 200_000
    bytes: int = 256 << 20
    levels: int = sys.maxsize
    plain: bool = False
    """Only plain objects are looked into; what else they hold, and what holds that, is held weakly."""


_ALL = Bound()
OF_A_STEP = Bound(objects=10_000, bytes=16 << 10, levels=12, plain=True)
"""Little is kept at each step: the log of a long run would cost more than it is worth."""
_ALL_AND_MORE = Bound(objects=1_000_000, bytes=1 << 30)
_DATA_BYTES = 1 << 30
"""How much of tensors that are no part of a model or an optimizer is copied, the smallest first: a training rarely writes to its data."""


class Snapshot:
    """What was reachable from `roots` at one moment, kept alive until it is put back, but for what the `bound` says."""

    def __init__(self, roots: Iterable[object], bound: Bound = _ALL) -> None:
        roots = list(roots)
        with undisturbed():
            met = reachable(roots, plain_ways_of if bound.plain else ways_of, bound, whole=bound.plain)
            self._loose = _loosened(met, set(map(id, roots))) if bound.plain else {}
        self._held = [(self._loose.get(id(value), value), faces) for value, faces in met] if self._loose else met
        self._kinds = [type(value) for value, _ in met]
        self.gradients = [_gradient_of(tensor) for tensor in self.of_kind(torch.Tensor) if _is_leaf(tensor)]
        self.contents = Contents()
        """What tensors held; empty until somebody keeps it."""
        # A step takes a plain snapshot for each of its models: it keeps the random states once, and the settings are not worth their time.
        self._random = None if bound.plain else RandomState.take()
        self._settings = None if bound.plain else ProcessSettings()

    @property
    def count(self) -> int:
        """How many objects were met."""
        return len(self._held)

    def of_kind(self, kind: type[T]) -> list[T]:
        """What was met of a type."""
        return [value for (value, _), known in zip(self._held, self._kinds, strict=True) if issubclass(known, kind)]

    def objects(self) -> list[object]:
        """All that was met and may change, as far as it still is."""
        values = (value.reference() if type(value) is _Loose else value for value, _ in self._held)
        return [value for value in values if value is not None]

    def put_back(self, guard: Guard, without: frozenset[int] = frozenset()) -> None:
        """Make all of it as it was, `without` the objects of these ids; what is no more is left; what resists, too, and is noted.

        May be done again, as where an interrupt has ended the first time.
        """
        if self._settings is not None:
            self._settings.put_back(guard)
        self.contents.put_back(guard)
        present = _Present(self.objects()).of(self._held) if self._loose else self._held
        for kind, (value, faces) in zip(self._kinds, present, strict=True):
            if value is GONE or id(value) in without or (faces is EMPTY.get(kind) and not value):
                continue
            if type(value) is not kind:  # as a lazy layer becomes another one
                guard.run(f"putting back a {kind.__name__}", object.__setattr__, value, "__class__", kind)
            write_back(value, faces, guard)
        for gradient in self.gradients:
            guard.run("putting back a gradient", gradient.put_back)
        if self._random is not None:
            self._random.put_back()

    def put_in_place(self, others: Mapping[int, Any], guard: Guard) -> None:
        """Where an object was held that has another in `others`, by its `id`, let that be held."""
        for value, faces in self._held:
            for kind, parts in faces:
                if any(id(part) in others for part in parts):
                    write_back(value, [(kind, [others.get(id(part), part) for part in parts])], guard)


def listening() -> list[object]:
    """What the user let torch call, or see, everywhere: global module hooks and modes."""
    tables = [table for name, table in vars(torch_module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    hooks = [hook for table in tables if isinstance(table, dict) for hook in table.values()]
    saving = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin without keywords
    return [*hooks, saving, *_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()]


class KeptState:
    """Everything that is reachable from `roots`, and the disk as `effects` keeps it; `guard` notes what could not be put back."""

    def __init__(self, roots: Iterable[object], guard: Guard, effects: Effects) -> None:
        self._guard, self.effects = guard, effects
        self._kept = Snapshot([*roots, *listening()], _ALL_AND_MORE)
        contents = self._kept.contents
        tensors = [tensor for tensor in self._kept.of_kind(torch.Tensor) if not is_lazy(tensor)]
        trained = _trained(self._kept)
        for tensor in (*(tensor for tensor in tensors if id(tensor) in trained), *(leaf.gradient for leaf in self._kept.gradients)):
            if tensor is not None:
                contents.keep(tensor)
        room_bytes, self._is_cut = _DATA_BYTES, False
        for tensor in sorted((tensor for tensor in tensors if id(tensor) not in trained), key=_size_bytes):
            room_bytes -= _size_bytes(tensor)
            if room_bytes < 0:
                self._is_cut = True
                break
            guard.run("keeping a tensor", contents.keep, tensor)

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """What is reachable of a type."""
        return self._kept.of_kind(kind)

    @property
    def is_whole(self) -> bool:
        """Whether there was room for all that is reachable."""
        return self._kept.count < _ALL_AND_MORE.objects and not self._is_cut

    def put_back(self) -> None:
        """Make all of it as it was. May be done again, also where an interrupt has ended the first time."""
        self.effects.again()
        self._kept.put_back(self._guard)


def _trained(objects: Snapshot) -> set[int]:
    """The ids of tensors that belong to a model or to an optimizer."""
    models = objects.of_kind(torch.nn.Module)
    own = [parameter for model in models for parameter in (*model._parameters.values(), *model._buffers.values()) if parameter is not None]
    for optimizer in objects.of_kind(torch.optim.Optimizer):
        own += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
        own += [tensor for entry in entries for tensor in entry.values() if isinstance(tensor, torch.Tensor)]
    return set(map(id, own))


def _size_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.numel() * tensor.element_size()


class Gradient(NamedTuple):
    """What a leaf of a graph had gathered, and whether it gathers."""

    tensor: torch.Tensor
    gradient: torch.Tensor | None
    requires_grad: bool

    def put_back(self) -> None:
        """Let it have that again."""
        with torch._C.DisableTorchFunctionSubclass():  # a lazy one would refuse
            if self.tensor.grad is not self.gradient:
                self.tensor.grad = self.gradient
            if self.tensor.requires_grad != self.requires_grad:
                self.tensor.requires_grad_(self.requires_grad)


def _gradient_of(tensor: torch.Tensor) -> Gradient:
    return Gradient(tensor, None if is_lazy(tensor) else tensor.grad, tensor.requires_grad)


def _is_leaf(tensor: Any) -> bool:
    return is_lazy(tensor) or (is_graph_leaf(tensor) and not tensor.is_inference())


class _Loose:
    """In the place of an object that a snapshot does not keep alive."""

    def __init__(self, value: object) -> None:
        self.identity, self.type = id(value), type(value)
        self.faces: Faces = []
        """What it held, where that was looked at."""
        try:
            self.reference: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.reference = _nowhere


def _nowhere() -> None:
    """Where a container without weak references is."""


def _loosened(met: list[tuple[Any, Faces]], roots: set[int]) -> dict[int, _Loose]:
    """Take what was not looked into out of `met`, and what it is in, and so on, up to the roots. Returns it by its id."""
    known = {id(value): faces for value, faces in met}
    holders: defaultdict[int, list[Any]] = defaultdict(list)
    todo: list[Any] = []
    for value, faces in met:
        for _, parts in faces:
            for part in parts:
                if not is_leaf(part):
                    holders[id(part)].append(value)
                    if id(part) not in known:
                        todo.append(part)
    loose: dict[int, _Loose] = {}
    while todo:
        value = todo.pop()
        if id(value) not in loose and id(value) not in roots:
            loose[id(value)] = _Loose(value)
            loose[id(value)].faces = known.get(id(value), [])
            todo += holders[id(value)]
    for _, faces in met if loose else ():
        for _, parts in faces:
            parts[:] = [loose.get(id(part), part) for part in parts]
    return loose


class _Present:
    """What loose objects are now: those that still are, or are found by their id among what can be reached, or tuples made anew."""

    def __init__(self, roots: list[object]) -> None:
        self._roots = roots
        self._known: dict[int, Any] = {}

    def of(self, met: list[tuple[Any, Faces]]) -> list[tuple[Any, Faces]]:
        """The same with objects in the places of loose ones, or `GONE`."""
        return [(self._one(value), [(kind, self._all(parts)) for kind, parts in faces]) for value, faces in met]

    def _all(self, parts: list[Any]) -> list[Any]:
        return [self._one(part) for part in parts]

    def _one(self, part: Any) -> Any:
        if type(part) is not _Loose:
            return part
        if part.identity not in self._known:
            self._known[part.identity] = GONE  # inside itself
            value = part.reference()
            self._known[part.identity] = self._again(part) if value is None else value
        return self._known[part.identity]

    def _again(self, loose: _Loose) -> Any:
        value: Any = self._reachable.get(loose.identity, GONE)
        value = value if type(value) is loose.type else GONE
        if not issubclass(loose.type, tuple) or not loose.faces:
            return value  # no other list can be told to be that list
        (_, parts), *more = loose.faces
        items = self._all(parts)
        if value is not GONE and same(list(tuple.__iter__(value)), items):
            return value
        is_lost = any(item is GONE for item in items) or any(rest for _, rest in more)
        return GONE if is_lost else tuple.__new__(loose.type, items)

    @cached_property
    def _reachable(self) -> dict[int, Any]:
        met = reachable(self._roots, plain_ways_of, Bound(), whole=True)
        parts = {id(part): part for _, faces in met for _, parts in faces for part in parts}
        return parts | {id(value): value for value, _ in met}


def write_back(value: object, faces: Faces, guard: Guard) -> None:
    """Make one object as it was."""
    for kind, parts in faces:
        guard.run(f"putting back a {type(value).__name__}", kind.write, value, parts)


def reachable(roots: Iterable[object], ways: Callable[[Any], list[Kind]], bound: Bound, *, whole: bool = False) -> list[tuple[Any, Faces]]:
    """Objects and what they hold, the nearest first. What takes too much room is passed by; if `whole`, what is read but in part, too."""
    met: dict[int, tuple[Any, Faces]] = {}  # also keeps all of them alive, so that no id is given away
    level, room_bytes = list(roots), bound.bytes
    for _ in range(bound.levels):
        further: list[object] = []
        for value in level:
            key = id(value)
            if key in met or len(met) >= bound.objects:
                continue
            if (empty := EMPTY.get(type(value))) is not None and not value:
                met[key] = value, empty
                continue
            faces, cost_bytes = _look_at(value, ways(value), room_bytes, whole)
            met[key] = value, faces
            room_bytes -= cost_bytes
            for kind, parts in faces:
                further += [part for part in parts if type(part) not in LEAVES]
                further += [part for part in kind.also(value) if type(part) not in LEAVES]
        if not further:
            break
        level = further
    return [(value, faces) for value, faces in met.values() if faces]


def _look_at(value: Any, ways: list[Kind], room_bytes: int, whole: bool) -> tuple[Faces, int]:
    try:
        cost_bytes = sum(way.cost_bytes(value) for way in ways)
    except Exception:  # noqa: BLE001 - a strange object is no reason not to look at the others
        return [], 0
    if cost_bytes > room_bytes:
        return [], 0
    faces = [(way, parts) for way in ways if (parts := _read(way, value)) is not None]
    return ([], 0) if whole and len(faces) < len(ways) else (faces, cost_bytes)


def _read(way: Kind, value: Any) -> list[Any] | None:
    try:
        return way.read(value)
    except Exception:  # noqa: BLE001 - as above
        return None


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
    """All ways to look at an object; none for a leaf, or where it is not plain."""
    ways = [] if is_leaf(value) else ways_of(value)
    return ways if all(way in _PLAIN or _is_plain(value, way, is_more=len(ways) > 1) for way in ways) else []


def _is_plain(value: Any, way: Kind, *, is_more: bool) -> bool:
    if way is INSTANCE:
        return (is_more and not attributes_of(value) and not members_of(type(value))) or _has_plain_attributes(value)
    return type(value).__module__.startswith("numpy.random") and way is of_numpy(value)


def _has_plain_attributes(value: object) -> bool:
    """An object of the user's, or an installed one of nothing but plain values: any other may have a life that is not in its attributes."""
    kind = type(value)
    if whose(kind) == "library":
        attributes = attributes_of(value)
        return attributes is not None and all(map(is_leaf, attributes.values()))
    return kind is SimpleNamespace or (whose(kind) == "user" and not issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)))
