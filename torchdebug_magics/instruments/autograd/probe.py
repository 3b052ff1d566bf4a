"""The autograd probe: steps are recorded op by op while that costs little; all others cost a few hooks."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch

from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.autograd.errors.explained import explained
from torchdebug_magics.instruments.autograd.errors.upstream import other_losses
from torchdebug_magics.instruments.autograd.faults.judged import LASTING, silent_faults, worst_first
from torchdebug_magics.instruments.autograd.faults.watched import WatchedTraining
from torchdebug_magics.instruments.autograd.graph_recorder import GraphRecorder
from torchdebug_magics.instruments.autograd.report import AutogradFinding, AutogradReport, LiveAutograd, verdict
from torchdebug_magics.instruments.autograd.source_readings import root_modules
from torchdebug_magics.instruments.autograd.tape import Backward, EventCourse
from torchdebug_magics.probing.compiler import CompiledCalls
from torchdebug_magics.probing.dispatch import is_being_compiled, modes_aside
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import fast_path_parts, is_compiled, unwrapped
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.tensors import is_traced, tensors_in

_RECORDED_STEPS = 2
"""Of one optimizer, whatever it costs: an error of autograd, as a fault of the loop, nearly always shows in the first or the second."""
_FREE_OPS = 3_000
"""Further steps are recorded up to so many ops: a count, so that no answer depends on how busy the machine is."""
_JUDGED_BACKWARDS = frozenset({4, 9})
_JUDGED_STEPS = frozenset({2, 8, 32, 128, 512})
"""In a function, whose models and optimizers are gone at the end of the cell. To look for all that are alive takes as long as a hundred
steps of a small model."""
_MOST_OPS = 60_000
_PASSES_OF_A_STEP = 4
"""Backward passes that count as a step where no optimizer makes any: gradients may be accumulated."""
_MOST_EVALUATIONS = 3
"""That are recorded of a model in training mode: one may be followed by `eval()`, and what comes again and again is known then."""
_KEPT_STEPS = 4
_OF_GRAD = ("outputs", "inputs", "grad_outputs")
_CREATE_GRAPH = 4
"""Its place among the arguments of ``torch.autograd.grad``."""


class AutogradProbe:
    """See `autograd`."""

    def __init__(self, context: CellContext = SCRIPT, *, every_step: bool = False) -> None:
        self._every_step = every_step
        self._last_error = context.last_error_line
        self._guard = Guard()
        self._hooks = Hooks(self._guard)
        self._recorder = GraphRecorder(self._hooks, self._guard)
        self._course = EventCourse()
        self._watched = WatchedTraining(self._recorder, self._course, self._guard)
        self._step_starts: list[int] = [0]
        self._error: AutogradFinding | None = None
        self._other_losses: tuple[AutogradFinding, ...] = ()
        self._silent: list[AutogradFinding] = []
        self._raised = ""
        self._depth = 0
        self._evaluations = ExitStack()
        """The hooks on the models that train, while nothing is recorded."""
        self._hooked: list[weakref.ref[torch.nn.Module]] = []
        self._sees_evaluation, self._evaluated_count = False, 0

    def attach(self, stack: ExitStack) -> None:
        """Record ops, and follow backward passes, updates and gradients set to zero."""
        stack.callback(self._recorder.forget)
        stack.push(self._ended)
        stack.callback(self._recorder.off)
        stack.callback(self._evaluations.close)
        self._recorder.on(root_modules())
        self._hooks.autograd_calls(stack, "backward", partial(self._around, "tensors"))
        self._hooks.autograd_calls(stack, "grad", partial(self._around, "outputs"))
        self._hooks.optimizer_steps(stack, self._before_step, self._after_step)
        self._hooks.zeroed_gradients(stack, self._around_zero)
        self._hooks.loader_batches(stack, self._watched.loaders.around)
        self._hooks.model_states(stack, self._around_state, self._around_load)
        here = threading.get_ident()
        self._hooks.unnoticed(stack)
        CompiledCalls(self._hooks, self._guard, self._with_hooks, lambda: threading.get_ident() == here, _nothing, _nothing).attach(stack)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._recorder.off()
        self._evaluations.close()
        self._hooks.sweep()

    def report(self) -> AutogradReport:
        """The error that ended the cell, or the silent faults."""
        silent = worst_first(self._silent)
        findings = (self._error, *silent) if self._error is not None else silent
        return verdict(
            AutogradReport(
                findings=findings,
                alternatives=self._other_losses,
                steps_count=self._course.steps_count,
                backward_count=self._course.backward_count,
                recorded_count=self._course.recorded_count,
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
            self._error = self._guard.run("explaining the error", explained, error, tape, self._course)
            if self._error is not None:
                self._other_losses = self._guard.run("the search for another loss", other_losses, self._error, error) or ()
            self._raised = kind.__name__ if kind is not None and self._error is None else ""
            gc.collect(1)  # Python's handles of graph nodes, which would keep what hangs on them
        self._judge()
        if isinstance(error, Exception):  # the update may have been about to come
            self._silent = [one for one in self._silent if not (one.kind == "never_stepped" and one.is_hint)]

    def _judge(self) -> None:
        """What the steps tell so far, while the models and optimizers of the user's functions are alive."""
        self._recorder.settle()
        with modes_aside():
            found = self._guard.run("the look for silent faults", silent_faults, self._watched) or []
        if self._watched.optimizers() or not self._course.steps:
            self._silent = [*found, *(one for one in self._silent if one.kind in LASTING)]
        else:  # of models and optimizers that are gone, the last look at them holds
            self._silent += [one for one in found if one.kind not in {"no_gradient", "not_in_optimizer", "stale_optimizer"}]

    def _around(self, argument: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of ``torch.autograd.backward`` or ``grad``, by what the first argument is called."""
        __tracebackhide__ = True
        given, is_loss = args[0] if args else kwargs.get(argument), argument == "tensors"
        if self._depth or is_being_compiled() or any(is_traced(tensor) for tensor in tensors_in(given)):
            return original(*args, **kwargs)
        event = self._guard.run("the look before a backward pass", self._begins, given, is_loss=is_loss)
        del given
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if event is not None:
                event.failed = True
            raise
        finally:
            self._depth -= 1
        if event is not None and not is_loss:
            arguments = dict(zip(_OF_GRAD, args, strict=False)) | kwargs
            self._guard.run(
                "the look at a derivative", self._watched.derivatives.returned, [arguments.get(name) for name in _OF_GRAD], result
            )
            if not (kwargs.get("create_graph") or any(args[_CREATE_GRAPH : _CREATE_GRAPH + 1])):
                event.constants = frozenset(map(id, tensors_in(result)))
        if event is not None and is_loss and not (self._watched.steps or self._every_step):  # a loop may update by hand, or never
            self._guard.run("the end of a step", self._between_steps, self._course.backward_count // _PASSES_OF_A_STEP)
        return result

    def _begins(self, given: Any, *, is_loss: bool) -> Backward:
        event = self._watched.backward(tuple(tensors_in(given)), is_loss=is_loss)
        self._course.add(event)
        if self._sees_evaluation or (self._course.backward_count in _JUDGED_BACKWARDS and self._recorder.is_in_function()):
            self._judge()
            self._sees_evaluation = False
        return event

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_being_compiled():
            has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
            self._guard.run("the look before an update", self._update_begins, optimizer, has_closure=has_closure)
            self._recorder.in_optimizer = True

    def _update_begins(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._course.add(self._watched.step(optimizer, has_closure=has_closure))
        if self._recorder.is_on and self._watched.steps[id(optimizer)] in _JUDGED_STEPS and self._recorder.is_in_function():
            self._judge()

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._recorder.in_optimizer = False
        if not is_being_compiled():
            alive = len(self._watched.optimizers()) or 1  # a loop may make its optimizer anew in each step
            steps_count = max(self._watched.steps[id(optimizer)], self._course.steps_count // alive)
            self._guard.run("the end of a step", self._between_steps, steps_count)

    def _between_steps(self, steps_count: int) -> None:
        """Goes on recording, begins again, or lets the loop run at full speed, by what recording has cost."""
        recorder = self._recorder
        if self._every_step or recorder.tape.count < _FREE_OPS or steps_count < _RECORDED_STEPS:
            if not recorder.is_on:
                self._evaluations.close()
                recorder.tape.clear()
                recorder.on(root_modules())
            self._step_starts.append(recorder.tape.count)
            if len(self._step_starts) > 2 * _KEPT_STEPS or recorder.tape.count - self._step_starts[0] > _MOST_OPS:
                self._step_starts = self._step_starts[-_KEPT_STEPS:]
                recorder.tape.drop_before(self._step_starts[0])
        elif recorder.is_on:
            recorder.off()
            self._hooked = [weakref.ref(root) for root in self._trained()]
            for root in self._with_hooks():
                self._hooks.own_calls(self._evaluations, root, self._evaluated, _nothing)

    def _with_hooks(self) -> list[torch.nn.Module]:
        return [root for ref in self._hooked if (root := ref()) is not None]

    def _trained(self) -> list[torch.nn.Module]:
        """The models that are updated, and that no compiler or fused kernel runs."""
        updated = self._watched.updated()
        calls = [seen for seen in self._recorder.root_calls.values() if seen.parameters & updated]
        roots = {id(root): root for seen in calls if (root := seen.root()) is not None}
        return [root for root in roots.values() if not is_compiled(root) and unwrapped(root) is root and not fast_path_parts([root])]

    def _evaluated(self, module: torch.nn.Module, _args: Any, _kwargs: Any) -> None:
        """A model that trains is called without gradients or in eval mode: the first such call is recorded, and each in training mode."""
        has_graph = torch.is_grad_enabled()
        calls, key = self._recorder.root_calls, (id(module), has_graph, module.training)
        is_suspect = key in calls and module.training and bool(calls[key].modes) and self._evaluated_count < _MOST_EVALUATIONS
        is_news = not (has_graph and module.training) and (key not in calls or is_suspect)
        if is_news and not is_being_compiled() and not self._depth and not self._recorder.is_on:
            self._sees_evaluation, self._evaluated_count = True, self._evaluated_count + 1
            self._guard.run("the look at an evaluation", self._recorder.on, [module])

    def _around_zero(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_seen = bool(args) and not is_being_compiled()  # without a holder, the call raises
        event = self._guard.run("the look at zero_grad()", self._watched.zeroed, args[0]) if is_seen else None
        result = original(*args, **kwargs)
        if event is not None:
            self._guard.run("the end of zero_grad()", self._watched.is_zeroed, event)
            self._course.add(event)
        return result

    def _around_state(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        state = original(module, *args, **kwargs)
        if not args and kwargs.get("destination") is None and not is_being_compiled():  # else it is asked for a part of a model
            self._guard.run("the look at state_dict()", self._watched.state_taken, state)
        return state

    def _around_load(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        given = args[0] if args else kwargs.get("state_dict")
        if not is_being_compiled():
            self._guard.run("the look at load_state_dict()", self._watched.state_loaded, module, given)
        return original(module, *args, **kwargs)


watch = AutogradProbe


def _nothing(*_: object) -> None:
    """At the end of a call."""
