"""Watches for outermost module calls, with hooks on the modules that are called so and on no others."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.livein import LiveIn
from torchdebug_magics.instruments.nanhunt.models import Models
from torchdebug_magics.instruments.nanhunt.positions import caller, frame_chain, same_place
from torchdebug_magics.instruments.nanhunt.step import Entry, Step
from torchdebug_magics.probing.modules import compiled_parts, fast_path_parts, is_compiled, live_modules, parts_of
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.weak_snapshot import WeakSnapshot
from torchdebug_magics.probing.where import is_user_code

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["Entries"]

_LEARNING_BACKWARDS = 3
"""Until then every module is watched for being called outermost; later only those that were."""


class Entries:
    """Fills the step, and while `replaying` is set asks that for the arguments of each call instead."""

    def __init__(self, hooks: Hooks, guard: Guard, done: Callable[[Entry, Any], None]) -> None:
        self.step = Step()
        self.models = Models()
        self.hooks = hooks
        self.replaying: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._guard = guard
        self._done = done
        self._depth = 0
        self._thread: int | None = None
        self._watched: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._adopted: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._stacks: dict[int, ExitStack] = {}
        self._stack = ExitStack()

    def attach(self, stack: ExitStack) -> None:
        """Watch every module that is alive, and those still to be made."""
        stack.enter_context(self._stack)
        stack.callback(self._forget)
        modules = list(live_modules())
        self._adopted.update(parts_of(modules))
        inside = compiled_parts(modules) | fast_path_parts(modules)
        for module in modules:
            if id(module) not in inside:
                self._watch(module)
        self.hooks.module_birth(self._stack, self._born, self._adopt)

    def is_ours(self) -> bool:
        """Whether this is the thread that trains: the first one in which anything was called."""
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

    def roots(self) -> list[torch.nn.Module]:
        """See `Models.roots`."""
        return self.models.roots()

    def entered(self) -> list[torch.nn.Module]:
        """See `Models.entered`."""
        return self.models.entered()

    def parameters(self) -> dict[int, torch.Tensor]:
        """The parameters of all modules entered in this step."""
        return self.models.parameters(self.step.started)

    def modules(self) -> list[torch.nn.Module]:
        """Every module that carries a hook of ours."""
        return list(self._watched.values())

    def settle(self, backward_count: int) -> None:
        """After a few steps, take the hooks off whatever was never called outermost."""
        if backward_count != _LEARNING_BACKWARDS:
            return
        for key in [key for key in self._watched if key not in self.models and key in self._adopted]:
            del self._watched[key]
            self._stacks.pop(key).close()

    def _watch(self, module: torch.nn.Module) -> None:
        if id(module) in self._watched or is_compiled(module) or fast_path_parts([module]) or isinstance(module, torch.jit.ScriptModule):
            return
        if "_forward_pre_hooks" not in module.__dict__:
            return
        self.models.found_another()
        self._watched[id(module)] = module
        mine = self._stacks[id(module)] = self._stack.enter_context(ExitStack())
        self.hooks.own_calls(mine, module, self._before, self._after)

    def _born(self, module: torch.nn.Module) -> None:
        self._guard.run("the watch over a new module", self._watch, module)

    def _adopt(self, child: torch.nn.Module) -> None:
        self._adopted[id(child)] = child
        self.models.found_another()

    def _forget(self) -> None:
        self._watched.clear()
        self._adopted.clear()
        self._stacks.clear()
        self.models.clear()
        self.step.clear()

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
        if self._depth or self.replaying is not None:
            return
        entry = self.step.latest(module)
        if entry is not None:
            self._guard.run("the look at a model's arguments", self._see_writes, entry)
            self._done(entry, output)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, frame = self.step, caller(sys._getframe())
        # With its graph retained a step does not end at its backward(), but where the loop goes round.
        if step.closed or (step.backwards and same_place(step.chain, frame_chain(frame))):
            step.clear()
        if not step.entries:
            step.chain = frame_chain(frame)
            step.live_in = LiveIn.take(step.chain)
        known = self.models.know(module, [one.frame for one in step.chain if is_user_code(one.frame.f_code)])
        if id(module) not in step.started:
            step.started.add(id(module))
            step.buffers.append(known.buffers.take())
            if known.places:
                step.python.append(WeakSnapshot(known.places))
        step.add(Entry.take(module, args, kwargs, RandomState.take(), copied=known.writes_input))

    def _see_writes(self, entry: Entry) -> None:
        if entry.writes_input():
            self.models.know(entry.module, ()).writes_input = True
