"""Why a training stalls: the same training again and again, each time with exactly one suspect changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchdebug_magics.instruments.overfit.change import Change
from torchdebug_magics.instruments.overfit.report import Trial
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, parameters, samples, units, updates
from torchdebug_magics.instruments.overfit.suspects.evidence import Evidence
from torchdebug_magics.instruments.overfit.training import Training

__all__ = ["Diagnosis", "diagnose"]

_HALF = 0.5
_LONGER, _QUARTERS = 4, 4


@dataclass(frozen=True)
class Diagnosis:
    """What the trials have shown."""

    trials: tuple[Trial, ...] = ()
    change: Change | None = None
    verified: bool = False
    cured: tuple[float, ...] = ()
    passed: bool = False
    reason: str = ""


def diagnose(seen: Evidence, again: Callable[[Change, int], Training]) -> Diagnosis:
    """Try the suspects until the training learns; `again` trains from the start with a change, for so many times
    the steps. A change with which the loss falls too slowly is given more of them, if none is better."""
    trials: list[Trial] = []
    slow: list[Change] = []
    certain: Change | None = None
    for change in _suspects(seen):
        if change.is_certain or not _can_be_tried(change):
            certain = certain or change
            if change.suspect == "output_ignores_input":
                break
            continue
        trial = again(change, 1)
        trials.append(_told(change, trial))
        if trial.learned:
            return Diagnosis(tuple(trials), change, verified=True, cured=tuple(trial.losses))
        if trial.goal is not None and trial.goal.nearly(trial.losses, _QUARTERS * (_LONGER - 1)):
            slow.append(change)
    for change in slow if certain is None else ():
        trial = again(change, _LONGER)
        trials.append(_told(change, trial))
        if trial.learned:
            return Diagnosis(tuple(trials), change, verified=True, cured=tuple(trial.losses))
    if certain is not None:
        return Diagnosis(tuple(trials), certain)
    return _without_cause(seen, tuple(trials))


def _told(change: Change, trial: Training) -> Trial:
    return Trial(
        suspect=change.suspect,
        change=change.text,
        last_loss=trial.losses[-1] if trial.losses else math.nan,
        learns=trial.learned,
        steps=len(trial.losses),
        error="" if trial.error is None else f"{type(trial.error).__name__}: {trial.error}".splitlines()[0],
    )


def _without_cause(seen: Evidence, trials: tuple[Trial, ...]) -> Diagnosis:
    base, goal = seen.base, seen.base.goal
    if base.error is not None or goal is None or not base.losses:
        return Diagnosis(trials)
    fell = base.losses[0] - base.losses[-1]
    if not goal.is_known and fell > _HALF * abs(base.losses[0]):
        return Diagnosis(trials, passed=True, reason="the loss has further terms, and no change lowers it to zero")
    tried = f"none of {len(trials)} changes makes it learn" if trials else "no suspect was found"
    return Diagnosis(trials, reason=tried)


def _suspects(seen: Evidence) -> Iterator[Change]:
    for part in (parameters, loss_inputs, samples, units, updates):
        yield from part.suspects(seen)
    if seen.base.error is not None or seen.base.goal is None:
        return
    goal = seen.base.goal
    yield from samples.constant_output(seen)
    if not goal.is_known and goal.has_converged(seen.base.losses):
        return
    yield from updates.learning_rates(seen)
    yield from samples.capacity(seen)


def _can_be_tried(change: Change) -> bool:
    hooks = (change.on_models, change.on_call, change.on_input, change.on_update, change.on_first_backward)
    return any(one is not None for one in hooks) or change.keeps_gradients or change.backward_scale != 1.0
