"""The state of a program: everything of the user's that code can reach from some objects, as it is now, and back again.

Code that runs once more must leave no trace in what it only happens to touch: counters, lists, queues, files, whatever a hook fills.
Which of them it will touch cannot be told beforehand, so all is kept that can be reached, nearest first, while there is room; with it
gradients, random generators and settings of the process. What tensors hold is kept in `Snapshot.contents`, by whoever knows which of
them are written. What leaves the process, a line written to a file or a request, is the matter of `probing.outside`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn.parameter import is_lazy

from torchdebug_magics.probing.graphs import is_graph_leaf
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.attributes import undisturbed
from torchdebug_magics.probing.state.contents import Contents
from torchdebug_magics.probing.state.kinds import EMPTY, LEAVES, Kind
from torchdebug_magics.probing.state.process_settings import ProcessSettings
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.states import ways_of

T = TypeVar("T")
Faces: TypeAlias = list[tuple[Kind, list[Any]]]
"""What an object held, by each way to look at it."""


@dataclass(frozen=True)
class Bound:
    """How much is looked at."""

    objects: int = 200_000
    bytes: int = 256 << 20
    levels: int = sys.maxsize


_ALL = Bound()


class Snapshot:
    """What was reachable from `roots` at one moment, kept alive until it is put back."""

    def __init__(self, roots: Iterable[object], bound: Bound = _ALL) -> None:
        with undisturbed():
            self._held = reachable(roots, ways_of, bound)
        self._kinds = [type(value) for value, _ in self._held]
        self.gradients = [_gradient_of(tensor) for tensor in self.of_kind(torch.Tensor) if _is_leaf(tensor)]
        self.contents = Contents()
        """What tensors held; empty until somebody keeps it."""
        self._random = RandomState.take()
        self._settings = ProcessSettings()

    def of_kind(self, kind: type[T]) -> list[T]:
        """What was met of a type."""
        return [value for (value, _), known in zip(self._held, self._kinds, strict=True) if issubclass(known, kind)]

    def objects(self) -> list[object]:
        """All that was met and may change."""
        return [value for value, _ in self._held]

    def put_back(self, guard: Guard, without: frozenset[int] = frozenset()) -> None:
        """Make all of it as it was, `without` the objects of these ids; what resists is left, and noted.

        May be done again, as where an interrupt has ended the first time.
        """
        self._settings.put_back(guard)
        self.contents.put_back(guard)
        for kind, (value, faces) in zip(self._kinds, self._held, strict=True):
            if faces is EMPTY.get(kind) and not value:
                continue
            if type(value) is not kind:  # as a lazy layer becomes another one
                guard.run(f"putting back a {kind.__name__}", object.__setattr__, value, "__class__", kind)
            if id(value) not in without:
                write_back(value, faces, guard)
        for gradient in self.gradients:
            guard.run("putting back a gradient", gradient.put_back)
        self._random.put_back()

    def put_in_place(self, others: Mapping[int, Any], guard: Guard) -> None:
        """Where an object was held that has another in `others`, by its `id`, let that be held."""
        for value, faces in self._held:
            for kind, parts in faces:
                if any(id(part) in others for part in parts):
                    write_back(value, [(kind, [others.get(id(part), part) for part in parts])], guard)


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


def write_back(value: object, faces: Faces, guard: Guard) -> None:
    """Make one object as it was."""
    for kind, parts in faces:
        guard.run(f"putting back a {type(value).__name__}", kind.write, value, parts)


def reachable(roots: Iterable[object], ways: Callable[[Any], list[Kind]], bound: Bound, *, whole: bool = False) -> list[tuple[Any, Faces]]:
    """Objects and what they hold, the nearest first. What takes too much room is passed by; if `whole`, what is read but in part, too."""
    found: dict[int, tuple[Any, Faces]] = {}  # also keeps all of them alive, so that no id is given away
    level, room_bytes = list(roots), bound.bytes
    for _ in range(bound.levels):
        further: list[object] = []
        for value in level:
            key = id(value)
            if key in found or len(found) >= bound.objects:
                continue
            if (empty := EMPTY.get(type(value))) is not None and not value:
                found[key] = value, empty
                continue
            faces, cost_bytes = _look_at(value, ways(value), room_bytes, whole)
            found[key] = value, faces
            room_bytes -= cost_bytes
            for kind, parts in faces:
                further += [part for part in parts if type(part) not in LEAVES]
                further += [one for one in kind.also(value) if type(one) not in LEAVES]
        if not further:
            break
        level = further
    return [(value, faces) for value, faces in found.values() if faces]


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
