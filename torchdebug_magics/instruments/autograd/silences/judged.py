"""What the recorded steps mean: each fault that raised nothing, worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.silences.alive import Alive
from torchdebug_magics.instruments.autograd.silences.gradients import missing_gradients, nothing_reached
from torchdebug_magics.instruments.autograd.silences.leaking_batch import batch_leaks
from torchdebug_magics.instruments.autograd.silences.modes import double_softmax, wrong_modes
from torchdebug_magics.instruments.autograd.silences.optimizers import wrong_tensors
from torchdebug_magics.instruments.autograd.silences.order import wrong_order
from torchdebug_magics.instruments.autograd.silences.stale import stale_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchdebug_magics.instruments.autograd.report import Finding, Kind
    from torchdebug_magics.instruments.autograd.silences.watched import Watched

__all__ = ["silent_faults", "worst_first"]

_ORDER: tuple[Kind, ...] = (
    "stale_value", "grad_disabled", "stale_optimizer", "no_gradient", "zeroed_before_step", "stepped_without_backward", "never_stepped",
    "not_in_optimizer", "leaking_batch", "double_softmax", "never_zeroed", "train_in_eval_mode", "eval_in_train_mode",
)  # fmt: skip
_FOLLOWS: Mapping[Kind, frozenset[Kind]] = {
    "zeroed_before_step": frozenset({"grad_disabled", "stale_optimizer", "no_gradient"}),
    "stepped_without_backward": frozenset({"grad_disabled", "stale_optimizer", "no_gradient"}),
    "not_in_optimizer": frozenset({"stale_optimizer"}),
    "no_gradient": frozenset({"stale_optimizer", "grad_disabled"}),
}
"""What is only a consequence where one of the others is found."""


def silent_faults(watched: Watched) -> list[Finding]:
    """As far as the recorded steps tell until now."""
    judges: tuple[Callable[[Watched, Alive], list[Finding]], ...] = (
        stale_values, nothing_reached, wrong_order, wrong_tensors, missing_gradients, batch_leaks, double_softmax, wrong_modes,
    )  # fmt: skip
    alive = Alive.now()
    return [finding for judge in judges for finding in judge(watched, alive)]


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Each once, without those that follow from others."""
    kinds = {one.kind for one in findings}
    known = {
        (one.kind, str(one.location), one.parameters): one for one in reversed(findings) if not _FOLLOWS.get(one.kind, frozenset()) & kinds
    }
    return tuple(sorted(known.values(), key=lambda one: _ORDER.index(one.kind)))
