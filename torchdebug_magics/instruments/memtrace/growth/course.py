"""The course of the cell: which phase runs, which step it belongs to, and whether that step is followed op by op."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.memtrace.findings import Phase
from torchdebug_magics.instruments.memtrace.growth.growth_watch import GrowthWatch
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.ledger.memory_census import Census, mark_called
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Tracer
from torchdebug_magics.instruments.memtrace.ledger.phases import Phases, Places
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.tensors import tensors_in

_Call: TypeAlias = "tuple[int, int]"
"""(its frame's id, where in its code it stands) of a running call of the user's. A frame with the id of a gone one is at its place."""


class Course:
    """Turns the tracer on and off, and tells it and the ledger where the cell stands."""

    def __init__(
        self, tracer: Tracer, phases: Phases, places: Places, steps: Steps, watch: GrowthWatch, guard: Guard, *, is_light: bool
    ) -> None:
        self.tracer = tracer
        self._ledger = tracer.ledger
        self._phases = phases
        self._places = places
        self._steps = steps
        self._watch = watch
        self._guard = guard
        self._is_light = is_light
        self.is_followed = not is_light
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

    @property
    def is_between(self) -> bool:
        """Whether no call, backward pass or update runs."""
        return not self._before

    def start(self, phase: Phase) -> None:
        """A call, a backward pass or an update begins."""
        self._before.append(self._phases.now.phase)
        self._enter(phase)
        if phase != "forward":
            self._called.clear()
        if not self.is_followed:
            self.tracer.off()

    def stop(self) -> None:
        """It is over."""
        self._enter(self._before.pop() if self._before else "other")
        if self.is_between:
            self.resume()

    def end(self) -> None:
        """The cell is over."""
        self._enter("other")

    def resume(self) -> None:
        """Between the phases all is followed: it is little, and not known beforehand."""
        if not self._is_light:
            self.tracer.on()

    def step_of(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call of a model begins a step, or is a part of one."""
        given = list(tensors_in((args, kwargs)))
        if self.step_of_call(id(module), sum(tensor.numel() for tensor in given if not tensor.is_nested)):
            self._guard.run("the look at what is carried on", self._watch.is_given, given)
        if self.is_followed:
            mark_called(self._ledger, module)

    def step_of_call(self, of: int, size: int = 0) -> bool:
        """The call of the model or function with that id begins one; that of one more is a part of it, as of layers called one by one.

        Unless that code stands before the last call's: then a loop has gone round. `size` is that of the input, in elements. Whether a
        step began.
        """
        before, self._at = self._at, self._position()
        joins = bool(self._called) and of not in self._called and not _is_before(self._at, before)
        self._called = {of, *(self._called if joins else ())}
        self._step(of, self._places.user_frame(sys._getframe()), size, joins=joins)
        return not joins

    def step_without_model(self) -> None:
        """A backward pass or an update begins one, if no model was called since it ran last from the same line.

        So it is where the model is only functions, or compiled, or must not carry a hook.
        """
        if not self.is_between:
            return
        frame = self._places.user_frame(sys._getframe())
        line = (frame.f_code, frame.f_lasti) if frame is not None else None
        if self._ran.get(line, 0) == self._steps.count:
            self._step(0, frame, 0)
        self._ran[line] = self._steps.count

    def backward_begins(self, *, leaves: bool, leaves_graph: bool) -> None:
        """A backward pass; `leaves`: that gives parameters their gradients, `leaves_graph`: with a graph of their own."""
        if leaves_graph:
            self._watch.creates_graphs_at = self._places.here(sys._getframe())
        self.step_without_model()
        self._steps.trains(leaves=leaves)
        self.start("backward")

    def _position(self) -> list[_Call]:
        frame, found = self._places.user_frame(sys._getframe()), []
        while frame is not None:
            found.append((id(frame), frame.f_lasti))
            frame = self._places.user_frame(frame.f_back)
        return found[::-1]

    def _enter(self, phase: Phase) -> None:
        self._ledger.span = self._phases.enter(phase, at=self._ledger.clock, keeps_graph=torch.is_grad_enabled())

    def _step(self, of: int, frame: FrameType | None, size: int, *, joins: bool = False) -> None:
        place = (frame.f_code, frame.f_lasti) if frame is not None else (None, of)
        if not joins:
            self._first.clear()
        # One that goes from model to model is one loop; of several that a step calls from one place, each has its own.
        key = place if self._first.setdefault(place, of) == of else (of, *place)
        was_followed = self.is_followed
        if joins:
            follows = self._steps.join(key, self._places.here(frame), size, _get_sequence_nr())
        else:
            again, self.tracer.swells = self.tracer.swells, False
            follows = self._steps.begin(key, self._places.here(frame), size, _get_sequence_nr(), self._ledger.clock, again=again)
        self.is_followed = follows and not self._is_light
        self.tracer.iteration = self._steps.count
        if self.is_followed and not was_followed:
            self.tracer.adopt_all(Census())
        if was_followed and not self.is_followed and not self._ledger.counted_from:
            self._ledger.counted_from = self._ledger.clock
        if not joins:
            self._guard.run("the look for growth", self._watch.begins, self.tracer.adopt_all)
            self._steps.looked()


def _is_before(now: list[_Call], before: list[_Call]) -> bool:
    """Whether the innermost call that both have in common stands at an earlier place of its code."""
    for (call, place), (other, earlier) in zip(now, before, strict=False):
        if call != other or place != earlier:
            return call == other and place < earlier
    return False
