"""What the recorded steps mean: each fault that raised nothing, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.silences.gradients import missing_gradients, nothing_reached
from torchdebug_magics.instruments.autograd.silences.modes import double_softmax, wrong_modes
from torchdebug_magics.instruments.autograd.silences.optimizers import wrong_tensors
from torchdebug_magics.instruments.autograd.silences.order import wrong_order
from torchdebug_magics.instruments.autograd.silences.stale import stale_values

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.autograd.course import Course
    from torchdebug_magics.instruments.autograd.recording.tape import Tape
    from torchdebug_magics.instruments.autograd.report import Finding
    from torchdebug_magics.instruments.autograd.silences.watched import Watched

__all__ = ["silent_faults"]


def silent_faults(watched: Watched, tape: Tape, course: Course) -> list[Finding]:
    """Alarms first, then what may be meant so."""
    judges: tuple[Callable[[Watched, Tape, Course], list[Finding]], ...] = (
        stale_values, nothing_reached, wrong_order, wrong_tensors, missing_gradients, double_softmax, wrong_modes,
    )  # fmt: skip
    found: list[Finding] = []
    for judge in judges:
        more = judge(watched, tape, course)
        kinds = {one.kind for one in found}
        found += [one for one in more if one.kind not in kinds]
    return sorted(found, key=lambda one: one.is_hint)
