"""The course of the cell: which phase runs, which step it belongs to, and whether that step is followed op by op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.memtrace.growth.graph_watch import LOOKS_AT
from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch
from torchdebug_magics.instruments.memtrace.held.keepers import HandledErrors
from torchdebug_magics.instruments.memtrace.ledger.blocks import Phases
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Census, Tracer, mark, mark_gradients, mark_state
from torchdebug_magics.instruments.memtrace.trace import BUFFER, PARAMETER, Phase
from torchdebug_magics.probing.compiler import CompiledCalls
from torchdebug_magics.probing.dispatch import is_being_compiled
from torchdebug_magics.probing.modules import OutermostCalls
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.tensors import tensors_in

_Call: TypeAlias = "tuple[int, int]"
"""(its frame's id, where in its code it stands) of a running call of the user's. A frame with the id of a gone one is at its place."""
_CREATES_GRAPH = 3
"""Which argument of `torch.autograd.backward` it is."""
_SETTLED = 3
"""Steps after which only those modules stay watched that were called by themselves."""


class Course:
    """Turns the tracer on and off, and tells it and the ledger where the cell stands."""

    def __init__(self, tracer: Tracer, phases: Phases, watch: GrowthWatch, handled: HandledErrors, guard: Guard, *, is_light: bool) -> None:
        self._tracer = tracer
        self._ledger = tracer.ledger
        self._phases = phases
        self._places = tracer.places
        self._steps = watch.steps
        self._watch = watch
        self._handled = handled
        self._guard = guard
        self._is_light = is_light
        self._outermost = OutermostCalls(
            tracer.hooks,
            guard,
            lambda module, *given: guard.run("the look at a model call", self._call_begins, id(module), given, module),
            lambda module, output: guard.run("the look at a model's return", self._call_ends, output, tracer.returned, module),
        )
        self.modules = self._outermost.modules
        self._is_followed = not is_light
        """Whether the step that runs is."""
        self._before: list[Phase] = []
        """The phases in which those that run began."""
        self._called: set[int] = set()
        """The models called in the step that runs, as long as it has come to no backward pass or update."""
        self._first: dict[object, int] = {}
        """The first model that was called in the step that runs, by the place of the call."""
        self._at: list[_Call] = []
        """Where the user's code stood at the last call of a model."""
        self._ran: dict[object, int] = {}
        """By the line of a backward pass or an update: how many steps there were when it ran last."""

    def attach(self, stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
        """Follow the calls of these, and of those that are made from here on."""
        hooks, outermost = self._tracer.hooks, self._outermost
        outermost.attach(stack, modules)
        ended = partial(self._call_ends, book=self._tracer.took)
        CompiledCalls(hooks, self._guard, outermost.modules, outermost.is_ours, self._call_begins, ended).attach(stack)
        hooks.autograd_calls(stack, "backward", partial(self._around, _leaves=True))
        hooks.autograd_calls(stack, "grad", partial(self._around, _leaves=False))
        hooks.optimizer_steps(stack, self._before_update, self._after_update)
        stack.callback(self._tracer.off)
        self._resume()

    def end(self) -> None:
        """The cell is over."""
        self._enter("other")

    def _call_begins(self, of: int, inputs: object = (), module: torch.nn.Module | None = None) -> None:
        """The call of the model or function with that id begins a step, or is a part of one."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint, in the middle of a backward pass
        self._handled.look()
        if not self._before:
            given = list(tensors_in(inputs))
            if self._step_of_call(of, sum(tensor.numel() for tensor in given if not tensor.is_nested)):
                self._guard.run("the look at what is carried on", self._watch.is_given, given)
            if module is not None and self._is_followed:
                mark(self._ledger, module.buffers(), BUFFER)
                mark(self._ledger, module.parameters(), PARAMETER, is_called=True)
            if self._steps.count == _SETTLED:
                self._outermost.settle()
        self._start("forward")
        self._ledger.span.model = 0 if module is None else of

    def _call_ends(self, result: object, book: Callable[[object], None], module: torch.nn.Module | None = None) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if self._is_followed:
            self._guard.run("the look at what a call has made", book, result)
        if torch.is_grad_enabled():
            self._guard.run("the look at a graph", self._watch.graphs.mark, self._steps.count, result, module)
        self._stop()

    def _around(self, original: Any, *args: Any, _leaves: bool, **kwargs: Any) -> Any:
        """`_leaves`: whether it is a backward pass that gives parameters their gradients, and not only asked for some."""
        __tracebackhide__ = True
        if torch._C._current_graph_task_id() != -1 or is_being_compiled() or not self._outermost.is_ours():
            return original(*args, **kwargs)
        creates_graph = kwargs.get("create_graph") or args[_CREATES_GRAPH : _CREATES_GRAPH + 1] == (True,)
        self._guard.run("the look before a backward pass", self._backward_begins, leaves=_leaves, creates_graph=bool(creates_graph))
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.run("the look after a backward pass", self._stop)

    def _before_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        self._guard.run("the look for a step", self._step_without_model)
        if self._is_followed:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            self._guard.run("the look at gradients", mark_gradients, self._ledger, parameters)
        self._guard.run("the look before an update", self._start, "optimizer")

    def _after_update(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._outermost.is_ours():
            return
        if self._is_followed:
            self._guard.run("the look at an optimizer's state", mark_state, self._ledger, optimizer)
        self._guard.run("the look after an update", self._stop)

    def _start(self, phase: Phase) -> None:
        """A call, a backward pass or an update begins."""
        self._before.append(self._phases.now.phase)
        self._enter(phase)
        if phase != "forward":
            self._called.clear()
        if not self._is_followed:
            self._tracer.off()

    def _stop(self) -> None:
        """It is over."""
        self._enter(self._before.pop() if self._before else "other")
        if not self._before:
            self._resume()

    def _resume(self) -> None:
        """Between the phases all is followed: it is little, and not known beforehand."""
        if not self._is_light or self._is_followed:
            self._tracer.on()

    def _step_of_call(self, of: int, size: int = 0) -> bool:
        """The call of the model or function with that id begins one; that of one more is a part of it, as of layers called one by one.

        Unless that code stands before the last call's: then a loop has gone round. `size` is that of the input, in elements. Whether a
        step began.
        """
        before, self._at = self._at, self._position()
        joins = bool(self._called) and of not in self._called and not _is_before(self._at, before)
        self._called = {of, *(self._called if joins else ())}
        self._step(of, self._places.user_frame(sys._getframe()), size, joins=joins)
        return not joins

    def _step_without_model(self) -> None:
        """A backward pass or an update begins one, if no model was called since it ran last from the same line.

        So it is where the model is only functions, or compiled, or must not carry a hook.
        """
        if self._before:
            return
        frame = self._places.user_frame(sys._getframe())
        line = (frame.f_code, frame.f_lasti) if frame is not None else None
        if self._ran.get(line, 0) == self._steps.count:
            self._step(0, frame, 0)
        self._ran[line] = self._steps.count

    def _backward_begins(self, *, leaves: bool, creates_graph: bool) -> None:
        """A backward pass; `leaves`: that gives parameters their gradients, `creates_graph`: with a graph of their own."""
        if leaves and creates_graph:
            self._watch.creates_graphs_at = self._places.here(sys._getframe())
        self._step_without_model()
        self._steps.trains(leaves=leaves)
        self._start("backward")

    def _position(self) -> list[_Call]:
        frame, calls = self._places.user_frame(sys._getframe()), []
        while frame is not None:
            calls.append((id(frame), frame.f_lasti))
            frame = self._places.user_frame(frame.f_back)
        return calls[::-1]

    def _enter(self, phase: Phase) -> None:
        self._ledger.span = self._phases.enter(phase, at=self._ledger.clock, keeps_graph=torch.is_grad_enabled())

    def _step(self, of: int, frame: FrameType | None, size: int, *, joins: bool = False) -> None:
        place = (frame.f_code, frame.f_lasti) if frame is not None else (None, of)
        if not joins:
            self._first.clear()
        # One that goes from model to model is one loop; of several that a step calls from one place, each has its own.
        key = place if self._first.setdefault(place, of) == of else (of, *place)
        was_followed = self._is_followed
        again = not joins and self._tracer.swells
        if not joins:
            self._tracer.swells = False
        at, nodes = self._places.here(frame), _get_sequence_nr()
        follows = self._steps.step(key, at, size, nodes, self._ledger.clock, joins=joins, again=again)
        self._is_followed = follows and (not self._is_light or self._steps.has_risen)
        self._tracer.iteration = self._steps.count
        if self._is_followed and not was_followed:
            self._tracer.adopt_all(Census())
        if was_followed and not self._is_followed and not self._ledger.counted_from:
            self._ledger.counted_from = self._ledger.clock
        if not joins and (self._is_followed or self._steps.count in LOOKS_AT):
            self._guard.run("the look for growth", self._watch.begins, self._tracer.adopt_all)
            self._steps.looked()


def _is_before(now: list[_Call], before: list[_Call]) -> bool:
    """Whether the innermost call that both have in common stands at an earlier place of its code."""
    for (call, place), (other, earlier) in zip(now, before, strict=False):
        if call != other or place != earlier:
            return call == other and place < earlier
    return False
