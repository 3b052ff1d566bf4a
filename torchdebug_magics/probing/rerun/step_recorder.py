"""The step that is being recorded: each call of a model in it, with what is needed to run it again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.compiled_calls import CompiledCalls
from torchdebug_magics.probing.compiling import is_being_traced
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.outermost import OutermostCalls
from torchdebug_magics.probing.rerun.called_models import Models
from torchdebug_magics.probing.rerun.carried_variables import LiveInKeeper
from torchdebug_magics.probing.rerun.earlier_values import Batches
from torchdebug_magics.probing.rerun.frame_positions import caller, frame_chain, places, same_place
from torchdebug_magics.probing.rerun.step import Entry, Step
from torchdebug_magics.probing.rng import RandomKeeper
from torchdebug_magics.probing.weak_snapshot import WeakSnapshot
from torchdebug_magics.probing.where import frames_above, is_user_code

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import CodeType, FrameType

    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["StepRecorder"]

_LEARNING_BACKWARDS = 3
"""Until then every module is watched for being called outermost; later only those that were."""


class StepRecorder:
    """Fills the step, and while `replaying` is set asks that for the arguments of each call instead."""

    def __init__(self, hooks: Hooks, guard: Guard, done: Callable[[Entry, Any], None]) -> None:
        self.step = Step()
        self.models = Models()
        self.hooks = hooks
        self.replaying: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.guard = guard
        self.between: torch.Tensor = torch.get_rng_state()
        """Torch's random state at the last boundary between steps."""
        self.batches = Batches()
        self._random = RandomKeeper()
        self._live_in = LiveInKeeper()
        self._done = done
        self._depth = 0
        self._outermost = OutermostCalls(hooks, guard, self._before, self._after, found=self.models.found_another)

    def attach(self, stack: ExitStack) -> list[torch.nn.Module]:
        """Watch every module that is alive, which it returns, and those still to be made."""
        self.mark()
        stack.callback(self._forget)
        self.batches.attach(stack, self.hooks)
        modules = list(live_modules())
        self._outermost.attach(stack, modules)
        CompiledCalls(self.hooks, self.guard, self._outermost.modules, self.is_ours, _nothing, _nothing).attach(stack)
        return modules

    def is_ours(self) -> bool:
        """Whether this is the thread that trains: the first one in which anything was called."""
        return self._outermost.is_ours()

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
        return self._outermost.modules()

    def feed(self, feed: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """From now on outermost calls are not recorded, but given what `feed` says, and counted for themselves."""
        self.replaying, self._depth = feed, self._outermost.depth
        self._outermost.depth = 0

    def fed(self) -> None:
        """That is over, also where an interrupt inside a call has left it without an end."""
        if self.replaying is not None:
            self.replaying, self._outermost.depth = None, self._depth

    def mark(self) -> None:
        """A backward() or an update is over: what is drawn from now on is the next step's."""
        self.between = torch.get_rng_state()

    def settle(self, backward_count: int) -> None:
        """After a few steps, take the hooks off whatever was never called outermost."""
        if backward_count == _LEARNING_BACKWARDS:
            self._outermost.settle()

    def _forget(self) -> None:
        self.models.clear()
        self.step.clear()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replaying is not None:
            return self.replaying(module, args, kwargs)
        if not is_being_traced() and torch._C._current_autograd_node() is None:  # what a checkpoint runs again is no call of the step
            self.guard.run("the look at a model call", self._record, module, args, kwargs)
        return None

    def _after(self, module: torch.nn.Module, output: Any) -> None:
        entry = self.step.latest(module) if self.replaying is None and not is_being_traced() else None
        if entry is not None and not _is_in_a_function(sys._getframe()):
            self.guard.run("the look at a model's arguments", self._see_writes, entry)
            self._done(entry, output)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, frame = self.step, caller(sys._getframe())
        # With its graph retained a step does not end at its backward(), but where the loop goes round.
        if step.closed or (step.backwards and same_place(step.chain, frame_chain(frame))):
            step.clear()
        if step.entries:
            here = places(frame)
        else:
            step.chain, step.before = frame_chain(frame), self.between
            here = tuple([(one.f_code, instruction) for one, instruction in step.chain])
            step.live_in = self._live_in.take(step.chain, here)
        known = self.models.know(module, (one.frame for one in step.chain if is_user_code(one.frame.f_code)))
        if id(module) not in step.started:
            step.started.add(id(module))
            step.buffers.append(known.buffers.take())
            if known.places:
                step.python.append(WeakSnapshot(known.places))
        step.add(Entry.take(module, args, kwargs, random=self._random.take(), place=here, copied=known.writes_input))

    def _see_writes(self, entry: Entry) -> None:
        if entry.writes_input():
            self.models.know(entry.module, ()).writes_input = True


# Written in C from PyTorch 2.15 on, without a frame of its own.
_APPLY: CodeType | None = getattr(getattr(vars(torch.autograd.Function)["apply"], "__func__", None), "__code__", None)


def _is_in_a_function(frame: FrameType) -> bool:
    """Whether a `torch.autograd.Function` runs the call, as a reentrant checkpoint does: its outputs have no graph yet."""
    if torch.is_grad_enabled():
        return False
    return any(_takes_context(one) if _APPLY is None else one.f_code is _APPLY for one in frames_above(frame))


def _takes_context(frame: FrameType) -> bool:
    """Whether the frame is the `forward` of a `torch.autograd.Function`, whose first argument is the node of the graph."""
    code = frame.f_code
    if code.co_name != "forward" or not code.co_argcount or code.co_varnames[0] == "self":
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), torch._C._FunctionBase)


def _nothing(_told: object) -> None:
    """A compiled call is one piece: what is recorded of a step, the calls around it tell."""
