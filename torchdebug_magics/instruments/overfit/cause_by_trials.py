"""Why a training stalls: the same training again and again, each time with exactly one suspect changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchdebug_magics.instruments.overfit.report import Trial
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, parameter_faults, units
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
from torchdebug_magics.instruments.overfit.training.change import Change
from torchdebug_magics.instruments.overfit.training.training import Training

_HALF, _SOME, _ALMOST = 0.5, 0.1, 0.1
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


def diagnose(seen: Evidence, again: Callable[[Change | None, int], Training]) -> Diagnosis:
    """Try the suspects until the training learns; `again` trains from the start with a change, for so many times the steps.

    Faults come before settings that may be meant. A change with which the loss falls, and too slowly, is given more steps at the end.
    """
    trials = _Trials(again)
    for stage in (_faults, _settings):
        for change in stage(seen):
            if trials.shows(change):
                return trials.result()
        if trials.evident is not None and trials.evident.suspect == "output_ignores_input":
            break
        if stage is _faults and trials.evident is None and not trials.slow and _is_slow(seen, again):
            return Diagnosis(tuple(trials.told), passed=True, reason="but only with twice as many steps")
    if any(trials.shows(change, _LONGER) for change in list(trials.slow)):
        return trials.result()
    if trials.evident is None and seen.base.goal is not None and seen.base.goal.is_known:
        for change in units.capacity(seen):
            if trials.shows(change) or trials.shows(change, _LONGER):
                return trials.result()
    return _without_cause(seen, tuple(trials.told)) if trials.evident is None else Diagnosis(tuple(trials.told), trials.evident)


class _Trials:
    """Those made so far."""

    def __init__(self, again: Callable[[Change | None, int], Training]) -> None:
        self._again = again
        self.told: list[Trial] = []
        self.slow: list[Change] = []
        """Changes with which more steps are likely to be enough."""
        self.evident: Change | None = None
        self._learned: tuple[Change, Training] | None = None

    def shows(self, change: Change, times: int = 1) -> bool:
        """Whether the training learns with a change."""
        if change.is_evident:
            self.evident = self.evident or change
        if not _can_be_tried(change):
            return False
        trial = self._again(change, times)
        self.told.append(_told(change, trial))
        if trial.learned:
            self._learned = change, trial
        elif times == 1 and trial.goal is not None and trial.goal.nearly(trial.losses, _QUARTERS * (_LONGER - 1)):
            self.slow.append(change)
        return trial.learned

    def result(self) -> Diagnosis:
        """Of the one that has learned."""
        assert self._learned is not None
        change, trial = self._learned
        return Diagnosis(tuple(self.told), change, verified=True, cured=tuple(trial.losses))


def _is_slow(seen: Evidence, again: Callable[[Change | None, int], Training]) -> bool:
    """Whether it learns with twice as many steps; then these are what is shown."""
    goal = seen.base.goal
    if seen.base.error is not None or goal is None or not goal.nearly(seen.base.losses, _QUARTERS):
        return False
    longer = again(None, 2)
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
    yield from parameter_faults.never_steps(seen)
    for suspects in (parameter_faults.suspects, loss_inputs.suspects, units.sample_suspects, units.suspects):
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


def _can_be_tried(change: Change) -> bool:
    hooks = (change.on_models, change.on_call, change.on_input, change.on_update, change.on_first_backward, change.on_end)
    return any(one is not None for one in hooks) or change.keeps_gradients or change.backward_scale != 1.0
