"""Why a training stalls: the same training again and again, each time with exactly one suspect changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchdebug_magics.instruments.overfit.report import Trial
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, parameter_faults, units
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
from torchdebug_magics.instruments.overfit.training.change import NOTHING, Change
from torchdebug_magics.instruments.overfit.training.training import Training

_HALF, _SOME, _ALMOST = 0.5, 0.1, 0.1
_LONGER, _QUARTERS = 4, 4


@dataclass(frozen=True)
class Diagnosis:
    """What the trials have shown."""

    trials: tuple[Trial, ...] = ()
    change: Change = NOTHING
    verified: bool = False
    cured: tuple[float, ...] = ()
    passed: bool = False
    reason: str = ""


def diagnose(seen: Evidence, again: Callable[[Change, int], Training]) -> Diagnosis:
    """Try the suspects until the training learns; `again` trains from the start with a change, for so many times the steps.

    Faults come before settings that may be meant. A change with which the loss falls, and too slowly, is given more steps at the end.
    """
    trials, goal = _Trials(again), seen.base.goal
    for stage in (_faults, _settings):
        for change in stage(seen):
            if trials.show(change):
                return trials.result
        if trials.result.change.suspect == "output_ignores_input":
            break
        if stage is _faults and trials.result.change is NOTHING and not trials.slow and _is_slow(seen, again):
            return replace(trials.result, passed=True, reason="but only with twice as many steps")
    longer = [(change, _LONGER) for change in trials.slow]
    if trials.result.change is NOTHING and goal is not None and goal.is_known:
        longer += [(change, times) for change in units.capacity(seen) for times in (1, _LONGER)]
    if any(trials.show(change, times) for change, times in longer) or trials.result.change is not NOTHING:
        return trials.result
    return _without_cause(seen, trials.result.trials)


class _Trials:
    """Those made so far, and what they have shown."""

    def __init__(self, again: Callable[[Change, int], Training]) -> None:
        self._again = again
        self.result = Diagnosis()
        """Its change is the one that has learned, or a fault that is evident without a trial."""
        self.slow: list[Change] = []
        """Changes with which more steps are likely to be enough."""

    def show(self, change: Change, times: int = 1) -> bool:
        """Whether the training learns with a change."""
        if change.is_evident and self.result.change is NOTHING:
            self.result = replace(self.result, change=change)
        if not change.can_be_tried:
            return False
        trial = self._again(change, times)
        self.result = replace(self.result, trials=(*self.result.trials, _told(change, trial)))
        if trial.learned:
            self.result = replace(self.result, change=change, verified=True, cured=tuple(trial.losses))
        elif times == 1 and trial.goal is not None and trial.goal.nearly(trial.losses, _QUARTERS * (_LONGER - 1)):
            self.slow.append(change)
        return trial.learned


def _is_slow(seen: Evidence, again: Callable[[Change, int], Training]) -> bool:
    """Whether it learns with twice as many steps; then these are what is shown."""
    goal = seen.base.goal
    if seen.base.error is not None or goal is None or not goal.nearly(seen.base.losses, _QUARTERS):
        return False
    longer = again(NOTHING, 2)
    if longer.learned:
        seen.base.losses = longer.losses
    return longer.learned


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
    best = min((one.last_loss for one in trials if one.suspect != "capacity" and math.isfinite(one.last_loss)), default=math.inf)
    is_lowest = base.losses[-1] - best <= _SOME * fell and goal.has_converged(base.losses, _ALMOST)
    if not goal.is_known and (fell > _HALF * abs(base.losses[0]) or is_lowest):
        return Diagnosis(trials, passed=True, reason="the loss has other terms, and no change brings it to zero")
    if goal.is_known and math.isfinite(fell) and fell > _SOME * abs(base.losses[0] - goal.floor):
        return Diagnosis(trials, units.too_small(seen))
    tried = f"none of {len(trials)} tried changes makes it learn" if trials else "no suspect was found"
    return Diagnosis(trials, reason=tried)


def _faults(seen: Evidence) -> Iterator[Change]:
    """Yields changes that repair what is wrong in any training."""
    for suspects in (parameter_faults.suspects, loss_inputs.suspects, units.suspects):
        yield from suspects(seen)
    if seen.base.error is None:
        yield from units.constant_output(seen)


def _settings(seen: Evidence) -> Iterator[Change]:
    """Yields changes of settings that may be intended in another training."""
    yield from parameter_faults.frozen(seen)
    if seen.base.error is not None or seen.base.goal is None:
        return
    yield from parameter_faults.update_suspects(seen)
    goal = seen.base.goal
    if not goal.is_known and goal.has_converged(seen.base.losses):
        return
    yield from parameter_faults.learning_rates(seen)
