"""What must be known at the start of a step to run it again: taken at the first outermost module call, dropped after `backward()`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.rerun.attempt import Place, Position
from torchdebug_magics.instruments.nanhunt.rerun.buffers import Buffers
from torchdebug_magics.instruments.nanhunt.rerun.weak_snapshot import WeakSnapshot
from torchdebug_magics.probing.source.code_owner import is_user_code, local_values, owner
from torchdebug_magics.probing.source.syntax import bound_names, lists_around, read_before_bound, tree_of
from torchdebug_magics.probing.source.where import span
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.tensors import tensors_in

_MOST_RECORDED = 64
"""Arguments of outermost calls kept for one step: a loop that never calls backward() must not pile up its inputs."""


@dataclass
class Entry:
    """One outermost module call."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    versions: tuple[int, ...]
    recorded: bool = True
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """Of a model that is known to write into its input: each tensor with what it held."""
    place: tuple[Place, ...] = ()
    """Where it was called; empty where that is not known."""

    @classmethod
    def take(
        cls,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        random: RandomState,
        place: tuple[Place, ...],
        copied: bool,
    ) -> Entry:
        """A call that begins now."""
        tensors = tuple(tensors_in((*args, kwargs)))
        copies = tuple((tensor, tensor.detach().clone()) for tensor in tensors) if copied else ()
        return cls(module, args, kwargs, random, _versions(tensors), copies=copies, place=place)

    def writes_input(self) -> bool:
        """Whether an argument was written in place since."""
        return self.versions != _versions(tuple(tensors_in((*self.args, self.kwargs))))

    def unchanged(self) -> bool:
        """Whether no argument was written in place since, or what it held is known."""
        return bool(self.copies) or not self.recorded or not self.writes_input()


@dataclass
class Step:
    """Everything since the last boundary: the outermost calls, and the state before the first of them."""

    entries: list[Entry] = field(default_factory=list)
    chain: tuple[Position, ...] = ()
    buffers: list[Buffers] = field(default_factory=list)
    python: list[WeakSnapshot] = field(default_factory=list)
    live_in: LiveIn | None = None
    before: torch.Tensor | None = None
    """Torch's random state when the last step was over: what the statements draw before they call the model, they drew from there."""
    backwards: int = 0
    """Backward calls since the first entry."""
    closed: bool = False
    """Whether its backward() is over: the next model call begins a new step."""
    grows_graph: bool = False
    """Whether gradients can flow from the output of any of its calls."""
    started: set[int] = field(default_factory=set)
    """Ids of the modules whose state was taken."""
    _forgotten: dict[int, Entry] = field(default_factory=dict)

    @property
    def backward_number(self) -> int:
        """Which backward() of the step was the last, 1-based; without a model call the step begins right before it."""
        return max(1, self.backwards) if self.entries else 1

    def add(self, entry: Entry) -> None:
        """One more call; of the oldest, when there are many, no more is known than that there were so many."""
        self.entries.append(entry)
        place = len(self.entries) - _MOST_RECORDED - 1
        if place >= 0:
            module = self.entries[place].module
            if id(module) not in self._forgotten:
                self._forgotten[id(module)] = Entry(module, (), {}, self.entries[0].random, (), recorded=False)
            self.entries[place] = self._forgotten[id(module)]

    def inside(self, sink: tuple[Position, ...]) -> Step | None:
        """Only what ran in the innermost function of the user's that calls backward(); None where that is all, or nothing."""
        outer = next((position.frame for position in sink if is_user_code(position.frame.f_code)), None)
        if outer is None or any(position.frame is outer for position in self.chain):
            return None
        found = [(entry, place) for entry in self.entries for place in entry.place if place[0] is outer.f_code]
        if not found:
            return None
        chain = (Position(outer, found[0][1][1]),)
        return Step(entries=[entry for entry, _ in found], chain=chain, buffers=self.buffers, python=self.python)

    def latest(self, module: torch.nn.Module) -> Entry | None:
        """The last call, where it is one of `module`."""
        return self.entries[-1] if self.entries and self.entries[-1].module is module else None

    def clear(self) -> None:
        """Forget all, so that nothing outlives its step because of us."""
        collections: tuple[list[Any] | set[int] | dict[int, Entry], ...]
        collections = self.entries, self.buffers, self.python, self.started, self._forgotten
        for one in collections:
            one.clear()
        self.chain, self.live_in, self.before, self.backwards = (), None, None, 0
        self.closed = self.grows_graph = False


def _versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


@dataclass(frozen=True)
class LiveIn:
    """By frame, the values that would otherwise be lost."""

    values: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, frame: FrameType) -> Mapping[str, Any]:
        """The values of one frame."""
        return self.values.get(id(frame), {})


class LiveInKeeper:
    """Takes them again and again. A step that begins where the last one began reads and overwrites the same variables."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()
        self._names: list[tuple[int, frozenset[str]]] = []
        """By how far out a frame is."""

    def take(self, chain: tuple[Position, ...], places: tuple[Place, ...]) -> LiveIn | None:
        """Of the frames of a chain, which stand at `places`; None where no frame has such a variable, which is the usual case."""
        if places != self._places:
            found = ((level, _carried(one.frame.f_code, one.instruction, one.line)) for level, one in enumerate(chain))
            self._places, self._names = places, [(level, names) for level, names in found if names]
        values = {id(chain[level].frame): local_values(chain[level].frame, names) for level, names in self._names}
        return LiveIn(values) if values else None


@functools.lru_cache(maxsize=256)
def _carried(code: CodeType, instruction: int, line: int) -> frozenset[str]:
    tree = tree_of(code.co_filename) if owner(code.co_filename) in {"user", "library"} else None
    where = span(code, instruction) or (line, -1, line, -1)
    statements: list[ast.stmt] = []
    for body, start in lists_around(tree, where):
        statements += body[start:] if not statements else body[start + 1 :]
    return frozenset(read_before_bound(statements) & bound_names(*statements))
