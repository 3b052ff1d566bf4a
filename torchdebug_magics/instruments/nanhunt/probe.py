"""The nanhunt probe: what torch calls while a cell is watched, and what is done about it."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from torchdebug_magics.errors import NonFiniteError
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.nanhunt.replay.conclusion import Outcome
from torchdebug_magics.instruments.nanhunt.replay.investigate import Investigator
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
from torchdebug_magics.instruments.nanhunt.report import LiveNan, NanFinding, NanReport
from torchdebug_magics.instruments.nanhunt.rerun.attempt import base_of, end_deferred, is_outermost_gradient, outside_transforms
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry, StepRecorder
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun
from torchdebug_magics.instruments.nanhunt.watch.checks import Checks, Tally
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import user_calls
from torchdebug_magics.probing.tensors import is_traced, tensors_in

_A_MOMENT_S = 0.3


class NanProbe:
    """See `nanhunt`. Until something goes wrong it runs one reduction a backward() and nothing else."""

    def __init__(
        self, _: CellContext = SCRIPT, *, keep_going: bool = False, max_findings: int = 10, layers: bool = False, anyway: bool = False
    ) -> None:
        self._keep_going = keep_going
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._tally = Tally(max_findings if keep_going else 1)
        self._recorder = StepRecorder(self._hooks, self._guard, self._left)
        self._rerun = StepRerun(self._recorder, self._observer, anyway=anyway)
        investigator = Investigator(self._rerun, self._guard.note)
        self._checks = Checks(self._tally, self._recorder, investigator, self._guard, stops=not keep_going, layers=layers)
        self._depth = 0
        self._stopped_by: NanFinding | None = None

    def _observer(self) -> Trace:
        return Trace(ModuleCalls(self._recorder.models.roots(), self._hooks))

    def attach(self, stack: ExitStack) -> None:
        """Watch sinks, optimizer steps and outermost module calls."""
        stack.push(self._ended)
        self._checks.begin(self._recorder.attach(stack))
        self._hooks.autograd_calls(stack, "backward", self._around_backward)
        self._hooks.autograd_calls(stack, "grad", self._around_grad)
        self._hooks.optimizer_steps(stack, self._before_update, self._after_update)
        stack.callback(self._checks.finish)

    def _ended(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self._tally.raised = "" if kind is None else kind.__name__

    def sweep(self) -> None:
        """Remove, and undo, what an interrupt left."""
        self._rerun.recover()
        self._rerun.forget()
        self._hooks.sweep(self._recorder.outermost.modules())

    def report(self) -> NanReport:
        """Freeze what was seen."""
        return self._tally.report(self._guard.problems)

    def live(self) -> LiveNan:
        """For the live view; any thread may ask."""
        return self._tally.live()

    def traceback_of(self, error: BaseException) -> list[str]:
        """One line in place of the traceback of the error that this probe raised: the report below it says the rest."""
        if not isinstance(error, NonFiniteError) or error.finding is not self._stopped_by:
            return []
        return [f"{type(error).__name__}: {error.finding.brief}; the report is below"]

    def kept(self) -> dict[str, object]:
        """``bad``: the tensors at the birth, by name."""
        return {"bad": self._tally.first.bad}

    def _around_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        keeps = kwargs.get("retain_graph") or kwargs.get("create_graph") or any(args[2:4])
        return self._around(original, args, kwargs, keeps=bool(keeps))

    def _around_grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        # The derivative that ``torch.func.grad`` takes ends a function, if nobody will differentiate it.
        is_last = is_outermost_gradient() and not any(tensor.requires_grad for tensor in _differentiated(args, kwargs))
        if (kwargs.get("create_graph") or any(args[4:5])) and not is_last:
            # A part of a loss that is still to come.
            return self._rerun.inner_call(original, *args, **kwargs) if self._rerun.active else original(*args, **kwargs)
        return self._around(original, args, kwargs, keeps=bool(kwargs.get("retain_graph") or any(args[3:4])))

    def _around(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps: bool) -> Any:
        __tracebackhide__ = True
        if self._depth or not self._recorder.outermost.is_ours():
            return original(*args, **kwargs)  # one that runs inside another, as reentrant checkpointing does
        tensors = _differentiated(args, kwargs)
        if any(is_traced(tensor) for tensor in tensors):
            return original(*args, **kwargs)  # a compiler or a function transform at work: there are no numbers
        if not self._rerun.active:
            self._guard.run("the check before a backward pass", self._checks.before_backward)
        self._depth += 1
        try:
            if self._rerun.active:
                return self._rerun.sink_call(original, tensors, *args, **kwargs)
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        with outside_transforms():
            outcome = self._guard.run("the check of a backward pass", self._checks.backward, tensors, result, keeps=keeps)
        self._act_on(outcome)
        return result

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        __tracebackhide__ = True
        if self._rerun.active:
            self._rerun.update_call()
        computes_gradients = (len(args) > 1 or bool(kwargs)) and any(map(callable, (*args[1:], kwargs.get("closure"))))
        if self._rerun.active or not self._recorder.outermost.is_ours():
            return
        if not computes_gradients:
            inside = bool(self._depth)  # of a hook that updates a parameter as soon as its gradient is there
            self._act_on(self._guard.run("the check before an update", self._checks.gradients, optimizer, inside=inside))
        if not self._depth:
            self._guard.run("the copy before an update", self._checks.before_update, optimizer, closure=computes_gradients)

    def _after_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        __tracebackhide__ = True
        if self._rerun.active or not self._recorder.outermost.is_ours():
            return
        self._checks.is_half_updated = bool(self._depth)
        outcome = None if self._depth else self._guard.run("the check after an update", self._checks.parameters, optimizer)
        self._tally.steps += 1
        self._recorder.step.clear()
        self._act_on(outcome)

    def _left(self, entry: Entry, output: Any) -> None:
        __tracebackhide__ = True
        self._act_on(self._guard.run("the check of a model's output", self._checks.output, entry, output, inside=bool(self._depth)))

    def _act_on(self, outcome: Outcome | None) -> None:
        __tracebackhide__ = True
        if outcome is not None and outcome.finding is not None and not self._keep_going:
            if outcome.finding.diagnosis == "averaged_from_other_ranks":
                with end_deferred():
                    time.sleep(_A_MOMENT_S)  # a launcher ends all as soon as one fails: the rank in which it was born first begins to look
            self._stopped_by = outcome.finding
            raise NonFiniteError(outcome.finding.sentence(), outcome.finding, outcome.bad, user_calls(sys._getframe()))


watch = NanProbe


def _differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What a gradient is asked of; inside ``torch.func.grad`` the numbers behind it."""
    tensors = tensors_in(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
    return tuple(map(base_of, tensors)) if is_outermost_gradient() else tuple(tensors)
