"""The course of the cell: which phase runs, which step it belongs to, and whether that step is followed op by op."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.memtrace.census import BUFFER, PARAMETER, Census, mark
from torchdebug_magics.probing.tensors import tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.phases import Phases
    from torchdebug_magics.instruments.memtrace.places import Places
    from torchdebug_magics.instruments.memtrace.report import Phase
    from torchdebug_magics.instruments.memtrace.steps import Steps
    from torchdebug_magics.instruments.memtrace.tracer import Tracer
    from torchdebug_magics.instruments.memtrace.watch import GrowthWatch
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Course"]


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
        """The call of a model begins a step."""
        size = sum(tensor.numel() for tensor in tensors_in((args, kwargs)) if not tensor.is_nested)
        self._step(id(module), self._places.user_frame(sys._getframe()), size)
        if self.is_followed:
            mark(self._ledger, module.parameters(), PARAMETER)
            mark(self._ledger, module.buffers(), BUFFER)

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

    def _enter(self, phase: Phase) -> None:
        self._ledger.span = self._phases.enter(phase, at=self._ledger.clock, keeps_graph=torch.is_grad_enabled())

    def _step(self, of: int, frame: FrameType | None, size: int) -> None:
        key = of, *((frame.f_code, frame.f_lasti) if frame is not None else ())
        was_followed = self.is_followed
        again, self.tracer.swells = self.tracer.swells, False
        follows = self._steps.begin(key, self._places.here(frame), size, _get_sequence_nr(), self._ledger.clock, again=again)
        self.is_followed = follows and not self._is_light
        self.tracer.iteration = self._steps.count
        if self.is_followed and not was_followed:
            self.tracer.adopt_all(Census())
        if was_followed and not self.is_followed and not self._ledger.counted_from:
            self._ledger.counted_from = self._ledger.clock
        self._guard.run("the look for growth", self._watch.begins)
