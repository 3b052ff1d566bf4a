"""What must be known at the start of a step to run it again: taken at the first outermost module call, dropped after `backward()`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.livein import LiveIn
from torchdebug_magics.probing.buffers import BufferKeeper, Buffers
from torchdebug_magics.probing.modules import compiled_parts, fast_path_parts, is_compiled, live_modules, parts_of, unwrapped
from torchdebug_magics.probing.places import places_of
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.tensors import kind_of, largest, tensors_in
from torchdebug_magics.probing.weak_snapshot import Place, WeakSnapshot
from torchdebug_magics.probing.where import frames_above, is_user_code

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["Entries", "Entry", "Position", "Step", "frame_chain"]

_MOST_ENTRIES = 64
"""Arguments of outermost calls kept for one step: a loop that never calls backward() must not pile up its inputs."""
_LEARNING_BACKWARDS = 3
"""Until then every module is watched for being called outermost; later only those that were."""


@dataclass(frozen=True)
class Position:
    """A frame and the instruction it stood at."""

    frame: FrameType = field(repr=False)
    line: int
    instruction: int


def frame_chain(frame: FrameType | None) -> tuple[Position, ...]:
    """The frame and its callers with their present positions, innermost first."""
    chain = []
    for one in frames_above(frame):
        chain.append(Position(one, one.f_lineno or 0, one.f_lasti))
        if not one.f_code.co_flags & CO_OPTIMIZED and one.f_locals is one.f_globals:
            break  # a cell or a script: what called it is nothing that a step could start in
    return tuple(chain)


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
    grows_graph: bool = False
    """Whether gradients can flow from its output."""

    def unchanged(self) -> bool:
        """Whether no argument was written in place since, or what it held is known."""
        return bool(self.copies) or not self.recorded or self.versions == _versions(self.args, self.kwargs)


@dataclass
class Step:
    """Everything since the last boundary: the outermost calls, and the state before the first of them."""

    entries: list[Entry] = field(default_factory=list)
    chain: tuple[Position, ...] = ()
    buffers: list[Buffers] = field(default_factory=list)
    python: list[WeakSnapshot] = field(default_factory=list)
    live_in: LiveIn | None = None
    backwards: int = 0
    """Backward calls since the first entry."""
    closed: bool = False
    """Whether its backward() is over: the next model call begins a new step."""
    started: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Forget all, so that nothing outlives its step because of us."""
        self.entries.clear()
        self.buffers.clear()
        self.python.clear()
        self.started.clear()
        self.chain, self.live_in, self.backwards, self.closed = (), None, 0, False


@dataclass(frozen=True)
class _Known:
    """What is worked out once for each module that is called outermost."""

    module: torch.nn.Module
    parameters: tuple[torch.nn.Parameter, ...]
    buffers: BufferKeeper
    places: list[Place]


class Entries:
    """Watches for outermost module calls, with hooks on the modules that are called so and on no others."""

    def __init__(self, hooks: Hooks, guard: Guard, done: Callable[[Entry, Any], None]) -> None:
        self.step = Step()
        self.replaying: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._hooks = hooks
        self._guard = guard
        self._done = done
        self._depth = 0
        self._thread: int | None = None
        self._known: dict[int, _Known] = {}
        self._stacks: dict[int, ExitStack] = {}
        self._watched: dict[int, torch.nn.Module] = {}
        self.bad_from_start: set[int] = set()
        self._adopted: set[int] = set()
        self._writers: set[int] = set()
        """Ids of modules that were seen to write into their input."""
        self._roots: tuple[object, list[torch.nn.Module]] | None = None
        self._stack = ExitStack()

    def attach(self, stack: ExitStack) -> None:
        """Watch every module that is alive, and those still to be made."""
        stack.enter_context(self._stack)
        stack.callback(self._forget)
        modules = list(live_modules())
        self._adopted = parts_of(modules)
        inside = compiled_parts(modules) | fast_path_parts(modules)
        for module in modules:
            if id(module) not in inside:
                self._watch(module)
        self._hooks.module_birth(self._stack, self._watch, lambda child: self._adopted.add(id(child)))

    def is_ours(self) -> bool:
        """Whether this is the thread that trains: the first one in which anything was called."""
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

    def roots(self) -> list[torch.nn.Module]:
        """Modules that were called outermost, then those that hold them, without what is a part of another."""
        key = frozenset(self._known), len(self._adopted), len(self._watched)
        if self._roots is None or self._roots[0] != key:
            self._roots = key, self._find_roots()
        return self._roots[1]

    def _find_roots(self) -> list[torch.nn.Module]:
        entered = [unwrapped(known.module) for known in self._known.values()]
        inside = {id(module) for root in entered for module in root.modules()}
        alive = list(live_modules())
        adopted = parts_of(alive)
        tops = [module for module in alive if id(module) not in adopted and (id(module) in inside or _holds(module, entered))]
        order = {id(module): place for place, module in enumerate(entered)}
        tops.sort(key=lambda module: order.get(id(unwrapped(module)), len(order)))
        return [*dict.fromkeys([*map(unwrapped, tops), *entered])]

    def entered(self) -> list[torch.nn.Module]:
        """Modules that were called outermost so far."""
        return [known.module for known in self._known.values()]

    def parameters(self) -> dict[int, torch.nn.Parameter]:
        """The parameters of all modules entered in this step."""
        return {id(parameter): parameter for key in self.step.started if key in self._known for parameter in self._known[key].parameters}

    def settle(self, backward_count: int) -> None:
        """After a few steps, take the hooks off whatever was never called outermost."""
        if backward_count != _LEARNING_BACKWARDS:
            return
        for key in [key for key in self._watched if key not in self._known and key in self._adopted]:
            del self._watched[key]
            self._stacks.pop(key).close()

    def _watch(self, module: torch.nn.Module) -> None:
        if id(module) in self._watched or is_compiled(module) or fast_path_parts([module]) or isinstance(module, torch.jit.ScriptModule):
            return
        if "_forward_pre_hooks" not in module.__dict__:
            return
        mine = ExitStack()
        try:
            self._hooks.own_calls(mine, module, self._before, self._after)
        except Exception:
            mine.close()
            raise
        self._watched[id(module)] = module
        self._stacks[id(module)] = self._stack.enter_context(mine)

    def _forget(self) -> None:
        self._watched.clear()
        self._stacks.clear()
        self._known.clear()
        self._roots = None
        self.step.clear()

    def modules(self) -> list[torch.nn.Module]:
        """Every module that carries a hook of ours."""
        return list(self._watched.values())

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self.is_ours():
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        if self.replaying is not None:
            return self.replaying(module, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is None:
            self._guard.run("the look at a model call", self._record, module, args, kwargs)
        return None

    def _after(self, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_ours():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self.replaying is None and self.step.entries and not self.step.entries[-1].unchanged():
            self._writers.add(id(module))
        if self._depth == 0 and self.replaying is None and self.step.entries and self.step.entries[-1].module is module:
            self._done(self.step.entries[-1], output)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self.step
        if step.closed or (step.backwards and _same_place(step.chain, sys._getframe(3))):
            step.clear()
        known = self._know(module)
        if not step.entries:
            # Below this stand our hook and torch's call of it: the caller is the first frame that is neither.
            step.chain = frame_chain(sys._getframe(3))
            step.live_in = LiveIn.take(step.chain)
        if id(module) not in step.started:
            step.started.add(id(module))
            step.buffers.append(known.buffers.take())
            if known.places:
                step.python.append(WeakSnapshot(known.places))
        if len(step.entries) >= _MOST_ENTRIES:
            oldest = next(entry for entry in step.entries if entry.recorded)
            oldest.args, oldest.kwargs, oldest.recorded = (), {}, False
            oldest.random = step.entries[0].random
        entry = Entry(module, args, kwargs, RandomState.take(), _versions(args, kwargs))
        if id(module) in self._writers:
            entry.copies = tuple((tensor, tensor.detach().clone()) for tensor in tensors_in((*args, kwargs)))
        step.entries.append(entry)

    def _know(self, module: torch.nn.Module) -> _Known:
        known = self._known.get(id(module))
        if known is None:
            inner = unwrapped(module)
            callers = [position.frame for position in self.step.chain if is_user_code(position.frame.f_code)]
            parts = list(inner.modules())
            own = [part for part in parts if not type(part).__module__.startswith("torch.nn.")]
            known = _Known(module, tuple(inner.parameters()), BufferKeeper(parts), places_of(own, callers))
            self._known[id(module)] = known
            if not math.isfinite(largest(known.parameters)):
                self.bad_from_start.update(id(parameter) for parameter in known.parameters if kind_of(parameter))
        return known


def _same_place(chain: tuple[Position, ...], frame: FrameType) -> bool:
    """Whether a call comes from where the step's first one came from: the loop went round, although its graph was retained."""
    again = frame_chain(frame)
    return any(
        one.frame is other.frame and one.instruction == other.instruction and is_user_code(one.frame.f_code)
        for one, other in zip(chain, again, strict=False)
    )


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors_in((*args, kwargs)))


def _holds(module: torch.nn.Module, parts: list[torch.nn.Module]) -> bool:
    wanted = {id(part) for part in parts}
    return any(id(inner) in wanted for inner in module.modules())
