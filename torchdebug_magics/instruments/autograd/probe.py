"""The autograd probe: the first steps are recorded op by op; later ones cost a few hooks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.autograd.course import Backward, Course, Update
from torchdebug_magics.instruments.autograd.errors.explained import explained
from torchdebug_magics.instruments.autograd.recording.recorder import Recorder
from torchdebug_magics.instruments.autograd.report import AutogradReport, LiveAutograd
from torchdebug_magics.instruments.autograd.silences.judged import silent_faults
from torchdebug_magics.instruments.autograd.silences.watched import Watched
from torchdebug_magics.instruments.autograd.verdict import verdict
from torchdebug_magics.probing.compiling import is_being_compiled
from torchdebug_magics.probing.graphs import upstream
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import live_modules, parts_of
from torchdebug_magics.probing.tensors import is_traced, tensors_in

if TYPE_CHECKING:
    from types import TracebackType

    from torchdebug_magics.instruments.autograd.report import Finding

__all__ = ["AutogradProbe"]

_RECORDED_STEPS = 2
"""Of one optimizer: an error of autograd, as a fault of the loop, nearly always shows in the first or the second."""
_RECORDED_BACKWARDS = 8
_MOST_OPS = 60_000
"""Where neither comes to that, recording ends here."""
_NODES_AT_FULL_SPEED = 2_000


class AutogradProbe:
    """See `autograd`."""

    def __init__(self, *, every_step: bool = False, last_error: str = "") -> None:
        self._every_step = every_step
        self._last_error = last_error
        self._guard = Guard()
        self._hooks = Hooks()
        self._recorder = Recorder(self._hooks, self._guard)
        self._course = Course()
        self._watched = Watched(self._recorder)
        self._recorded_count = 0
        self._step_starts: list[int] = [0]
        self._finding: Finding | None = None
        self._raised = ""
        self._depth = 0
        self._silent: tuple[Finding, ...] = ()
        self._settled = False
        self._evaluations = ExitStack()
        """The hooks on the models that train, once the loop runs at full speed."""

    def attach(self, stack: ExitStack) -> None:
        """Record ops, and follow backward passes, updates and gradients set to zero."""
        stack.callback(self._recorder.forget)
        stack.push(self._ended)
        stack.callback(self._recorder.off)
        stack.callback(self._evaluations.close)
        modules = list(live_modules())
        inner = parts_of(modules)
        self._recorder.on([module for module in modules if id(module) not in inner])
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.autograd_calls(stack, "grad", self._around_grad)
        self._hooks.optimizer_steps(stack, self._before_step, self._after_step)
        self._hooks.zeroed_gradients(stack, self._around_zero)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._recorder.off()
        self._evaluations.close()
        self._hooks.sweep()

    def report(self) -> AutogradReport:
        """The error that ended the cell, or the silent faults."""
        findings = (self._finding, *self._silent) if self._finding is not None else self._silent
        return verdict(
            AutogradReport(
                found=bool(findings),
                finding=findings[0] if findings else None,
                findings=findings,
                steps_count=self._course.steps_count,
                backward_count=self._course.backward_count,
                recorded_count=self._recorded_count,
                raised=self._raised,
                problems=tuple(self._guard.problems),
                last_error=self._last_error,
            )
        )

    def live(self) -> LiveAutograd:
        """For the live view; any thread may ask."""
        return LiveAutograd(self._course.steps_count, self._course.backward_count, self._recorder.is_on)

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}

    def _ended(self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        tape = self._recorder.settle()
        if error is not None:
            self._finding = self._guard.run("explaining the error", explained, error, tape, self._course)
            self._raised = kind.__name__ if kind is not None and self._finding is None else ""
        if self._finding is None:
            found = self._guard.run("the look for silent faults", silent_faults, self._watched, tape, self._course)
            self._silent = tuple(found or ())

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._around(original, args[0] if args else kwargs.get("tensors"), args, kwargs, is_backward=True)

    def _around_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._around(original, args[0] if args else kwargs.get("outputs"), args, kwargs, is_backward=False)

    def _around(self, original: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_backward: bool) -> Any:
        __tracebackhide__ = True
        tensors = tuple(tensors_in(given))
        if self._depth or is_being_compiled() or any(map(is_traced, tensors)):
            return original(*args, **kwargs)
        event = self._guard.run("the look before a backward pass", self._begins, tensors, is_backward=is_backward)
        del tensors, given
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if event is not None:
                event.failed = True
            raise
        finally:
            self._depth -= 1
        self._guard.run("the look after a backward pass", self._after_backward)
        return result

    def _begins(self, tensors: tuple[torch.Tensor, ...], *, is_backward: bool) -> Backward:
        event = Backward(self._recorder.tape.count, self._recorder.line_here())
        self._course.add(event)
        if self._recorder.is_on:
            self._recorded_count += 1
            nodes = list(upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
            event.nodes = frozenset(node._sequence_nr() for node in nodes if not hasattr(node, "variable"))
            if is_backward:
                self._watched.before_backward(event, tensors, nodes)
        return event

    def _after_backward(self) -> None:
        if self._recorder.is_on:
            if not self._every_step and not self._course.steps_count and self._course.backward_count >= _RECORDED_BACKWARDS:
                self._recorder.off()
            if self._recorder.is_on and self._settled and not self._every_step:
                self._recorder.off()
            self._bound()

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if is_being_compiled():
            return
        self._course.add(Update("step", self._recorder.line_here(), id(optimizer)))
        self._guard.run("the look before an update", self._watched.before_step, optimizer, is_recorded=self._recorder.is_on)
        self._recorder.in_optimizer = True

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._recorder.in_optimizer = False
        if self._recorder.is_on and not is_being_compiled():
            if self._watched.steps_of(optimizer) >= _RECORDED_STEPS and not self._every_step:
                self._guard.run("the end of the recording", self._settle_down)
            self._bound()

    def _settle_down(self) -> None:
        """The loop runs at full speed from here; of the models that train, only a call without gradients is looked at once more."""
        self._recorder.off()
        self._settled = True
        for root in self._watched.trained_with_modes():
            self._hooks.own_calls(self._evaluations, root, self._evaluated, _nothing)

    def _evaluated(self, module: torch.nn.Module, _args: Any, _kwargs: Any) -> None:
        if not torch.is_grad_enabled() and module.training and not is_being_compiled() and not self._depth:
            self._guard.run("the end of a watch", self._evaluations.close)
            self._guard.run("the look at an evaluation", self._recorder.on, [module])

    def _bound(self) -> None:
        """Under ``--every-step`` the last steps are kept; else recording ends where the first two are very long."""
        if self._recorder.tape.count > _MOST_OPS and not self._every_step:
            self._recorder.off()
        elif self._every_step:
            self._step_starts = [*self._step_starts[-2 * _RECORDED_STEPS :], self._recorder.tape.count]
            self._recorder.tape.drop_before(self._step_starts[0])

    def _around_zero(self, original: Any, holder: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not is_being_compiled():
            self._course.add(Update("zero_grad", self._recorder.line_here(), id(holder)))
        return original(holder, *args, **kwargs)


def _nothing(*_: object) -> None:
    """At the end of a call."""
