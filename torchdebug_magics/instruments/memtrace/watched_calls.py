"""What torch calls while memory is traced: models, compiled code, backward passes and updates, told to the course of the cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.memtrace.ledger.memory_census import mark_gradients, mark_state
from torchdebug_magics.probing.compiled_calls import CompiledCalls
from torchdebug_magics.probing.compiling import is_being_compiled
from torchdebug_magics.probing.outermost import OutermostCalls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from torchdebug_magics.instruments.memtrace.growth.course import Course
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
    from torchdebug_magics.instruments.memtrace.held.handled_error import HandledErrors
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Ledger
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["WatchedCalls"]

_CREATES_GRAPH = 3
"""Which argument of `torch.autograd.backward` it is."""
_SETTLED = 3
"""Steps after which only those modules stay watched that were called by themselves."""


class WatchedCalls:
    """The phases of a cell begin and end with them."""

    def __init__(
        self,
        hooks: Hooks,
        guard: Guard,
        course: Course,
        ledger: Ledger,
        steps: Steps,
        handled: HandledErrors,
    ) -> None:
        self._hooks = hooks
        self._guard = guard
        self._course = course
        self._ledger = ledger
        self._steps = steps
        self._handled = handled
        self._outermost = OutermostCalls(hooks, guard, self._entered, self._left)
        self._compiled = CompiledCalls(
            hooks, guard, self._outermost.modules, self._outermost.is_ours, self._compiled_begins, self._compiled_ended
        )
        self.modules = self._outermost.modules

    def attach(self, stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
        """Follow the calls of these, and of those that are made from here on."""
        self._outermost.attach(stack, modules)
        self._compiled.attach(stack)
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.autograd_calls(stack, "grad", self._around_grad)
        self._hooks.optimizer_steps(stack, self._before_update, self._after_update)

    def _entered(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._guard.run("the look at a model call", self._call_begins, module, args, kwargs)

    def _left(self, _module: torch.nn.Module, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._guard.run("the look at a model's return", self._call_ends, output)

    def _call_ends(self, output: object) -> None:
        if self._course.is_followed:
            self._course.tracer.returned(output)
        self._course.stop()

    def _call_begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint, in the middle of a backward pass
        self._handled.look()
        if self._course.is_between:
            self._course.step_of(module, args, kwargs)
            self._settle()
        self._course.start("forward")
        self._ledger.span.model = id(module)

    def _compiled_begins(self, function: int) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._course.is_between:
            self._course.step_of_call(function)
            self._settle()
        self._course.start("forward")

    def _compiled_ended(self, result: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._course.is_followed:
            self._guard.run("the look at what compiled code has made", self._course.tracer.took, result)
        self._course.stop()

    def _settle(self) -> None:
        if self._steps.count == _SETTLED:
            self._outermost.settle()

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        creates_graph = kwargs.get("create_graph") or args[_CREATES_GRAPH : _CREATES_GRAPH + 1] == (True,)
        return self._around(original, *args, **kwargs, _leaves=True, _leaves_graph=bool(creates_graph))

    def _around_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._around(original, *args, **kwargs, _leaves=False, _leaves_graph=False)

    def _around(self, original: Any, *args: Any, _leaves: bool, _leaves_graph: bool, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch._C._current_graph_task_id() != -1 or is_being_compiled() or not self._outermost.is_ours():
            return original(*args, **kwargs)
        self._guard.run("the look before a backward pass", self._course.backward_begins, leaves=_leaves, leaves_graph=_leaves_graph)
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.run("the look after a backward pass", self._course.stop)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        self._guard.run("the look for a step", self._course.step_without_model)
        if self._course.is_followed:
            self._guard.run("the look at gradients", mark_gradients, self._ledger, _parameters(optimizer))
        self._guard.run("the look before an update", self._course.start, "optimizer")

    def _after_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        if self._course.is_followed:
            self._guard.run("the look at an optimizer's state", mark_state, self._ledger, optimizer)
        self._guard.run("the look after an update", self._course.stop)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
