"""``%overfit``: train on a few samples, explain a stall, and leave everything as it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instrument import CellContext, Examined
from torchdebug_magics.instruments.overfit.batches import refuse_sharded
from torchdebug_magics.instruments.overfit.report import OverfitReport, Progress, Trial
from torchdebug_magics.instruments.overfit.subjects import ModelSteps, Subject, subject_of
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, parameter_faults, units
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import Evidence
from torchdebug_magics.instruments.overfit.suspects.units import unusual_weights
from torchdebug_magics.instruments.overfit.training.change import NOTHING, Change
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.source.where import excerpt
from torchdebug_magics.probing.state.kept_state import KeptState, eager
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.probing.tensors import tensors_in

_ACCUMULATE = "gradients accumulate over the steps: zero_grad() is missing"
REPEATED = "a training step {}, which every trial would repeat: leave it out of the step, or try it all the same with `--anyway`"
_CLOSE = 1e-4
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


def examine(
    context: CellContext,
    *values: Any,
    steps: int = 200,
    samples: int = 8,
    anyway: bool = False,
) -> Examined | None:
    """Train on the first `samples` of a batch for at most `steps`; all is as it was when this returns or raises.

    Raises `TorchDebugError` where the values cannot be trained, or where a step does what cannot be undone and `anyway` is not set. An
    error of the training itself is given back beside the report.
    """
    if not values and not context.keywords:
        return None
    for option, value in (("--steps", steps), ("--samples", samples)):
        if value < 1:
            msg = f"{option} must be at least 1, not {value}"
            raise TorchDebugError(msg)
    guard, hooks = Guard(), Hooks()
    effects = Effects(guard, *values, sentence=REPEATED, anyway=anyway)
    before = KeptState(values, guard, effects)
    refuse_sharded(before.of_kind(torch.Tensor))

    def examined() -> Examined:
        try:
            subject = subject_of(values, context.names, context.keywords, samples)
        finally:
            with interrupts_held():
                before.put_back()
        start = KeptState(subject.roots, guard, effects)
        try:
            with eager():
                return explained(subject, steps, start, guard, hooks, context.progress)
        finally:
            with interrupts_held():
                hooks.sweep()
                start.put_back()
                before.put_back()

    try:
        with effects.trial():
            result = examined()
    except Irrevocable as act:
        raise TorchDebugError(str(act)) from None
    finally:
        effects.finish()
    report = result.report
    if report is not None:  # with what putting files back has shown
        report = replace(report, problems=tuple(dict.fromkeys((*report.problems, *guard.problems))))
    return replace(result, report=report)


def explained(
    subject: Subject,
    most_steps: int,
    start: KeptState,
    guard: Guard,
    hooks: Hooks,
    progress: Callable[[Progress], None],
    base: Training | None = None,
) -> Examined:
    """The training, unless `base` is one that was made, and if it stalls, the trials; the start is put back before each of them.

    An interrupt is given back beside the report of what was done.
    """
    trainings = [] if base is None else [base]
    began_s = time.monotonic()
    done: list[tuple[str, float]] = []

    def trained(change: Change, times: int = 1) -> Training:
        start.put_back()
        doing = "training" if not trainings else change.text or "more steps"

        def tell(losses: list[float]) -> None:
            if len(losses) == 1:
                start.effects.attribute()
            progress(Progress(doing, tuple(losses), tuple(done)))

        training = Training(subject.steps, times * most_steps, hooks, change, tell)
        trainings.append(training)
        seen.trial[:] = [training]
        try:
            training.run()
        except torch.OutOfMemoryError as error:
            if len(trainings) == 1:
                raise
            training.error = error
        done.extend([(doing, training.losses[-1] if training.losses else float("nan"))] if len(trainings) > 1 else [])
        return training

    seen = Evidence(subject.names, start)
    try:
        seen.base = base = base if base is not None else trained(NOTHING)
        _refuse_rivals(base)
        seen.look(subject.samples)
        if not base.learned:
            start.put_back()
            seen.unusual = guard.run("looking at the initial weights", unusual_weights, base.named_modules()) or {}
        found = Diagnosis(passed=True, reason=_beside(base)) if base.learned and not _is_trivial(base) else diagnose(seen, trained)
        is_guess = found.change is NOTHING or (found.change.suspect == "capacity" and not found.verified)
        if base.accumulates and not found.passed and is_guess:  # a fact, though no training proves that it is the cause
            found = replace(found, change=NOTHING, reason="; ".join(filter(None, (found.reason, _ACCUMULATE))))
        start.put_back()
        steps = subject.model if base.error is None else None
        leaks = guard.run("looking for leaks between samples", leaks_of, steps) if steps is not None else ()
        report = replace(_report(base, found, seen), leaks=leaks or (), notes=subject.notes)
        report = replace(report, seconds_s=time.monotonic() - began_s, problems=tuple(guard.problems))
        return Examined(report, None if report.headline else base.error)
    except KeyboardInterrupt as stop:
        return Examined(stopped(trainings, tuple(guard.problems), time.monotonic() - began_s), stop)


def stopped(trainings: Sequence[Training], problems: tuple[str, ...], seconds_s: float = 0.0) -> OverfitReport:
    """The report of trainings that an interrupt has ended."""
    losses = tuple(trainings[0].losses) if trainings else ()
    trials = f" and {plural(len(trainings) - 1, 'trial')}" if len(trainings) > 1 else ""
    reason = f"after {plural(len(losses), 'step')}{trials}; everything is as it was before the training"
    cut_short = KeyboardInterrupt.__name__
    return OverfitReport(passed=False, losses=losses, reason=reason, problems=problems, seconds_s=seconds_s, cut_short=cut_short)


def _is_trivial(base: Training) -> bool:
    """Whether the loss is 0 for any output of the model."""
    return bool(base.losses) and base.losses[0] == 0 and any(call.is_classes and call.classes == 1 for call in base.first.losses)


def _beside(base: Training) -> str:
    """A fault that did not keep the model from learning the samples; empty where there is none."""
    if base.other_loss is not None:
        numbers = f"but with different random numbers the loss is {number(base.other_loss)}"
        return f"{numbers}: the model memorized the random draws of the step, such as a shuffle"
    if base.not_updated:
        return f"but the optimizer does not hold {listed([f'`{name}`' for name in base.not_updated])}"
    return f"but {_ACCUMULATE}" if base.accumulates else ""


def _refuse_rivals(base: Training) -> None:
    held = [set(map(id, parameters_of(optimizer))) for optimizer in base.optimizers]
    if base.backwards > 1 and any(first.isdisjoint(second) for first, second in combinations(held, 2)):
        msg = "the step minimizes several losses with several optimizers, as a GAN does: there is no single loss to overfit"
        raise TorchDebugError(msg)


def _report(base: Training, found: Diagnosis, seen: Evidence) -> OverfitReport:
    change, losses, goal = found.change, tuple(base.losses), base.goal
    is_known = goal is not None and goal.is_known
    known = base.first.losses[0].known_values() if not found.passed and is_known and base.first.losses else {}
    return OverfitReport(
        passed=found.passed,
        losses=losses,
        samples=seen.samples,
        cause=change.suspect,
        fix_state="verified" if found.verified else "advice",
        verified=found.verified,
        **{name: getattr(change, name) for name in ("headline", "fix", "parameters", "rows", "factor", "location", "module")},
        excerpt=excerpt(change.location) if change.location is not None else (),
        trials=found.trials,
        floor=goal.floor if goal is not None and is_known else None,
        chance=goal.chance if goal is not None else None,
        floor_name=next((name for name, value in known.items() if losses and abs(losses[-1] - value) <= 0.01 * value), ""),
        cured_losses=found.cured,
        held_still=("the same samples", "the same random numbers", "no dropout"),
        reason=found.reason,
        error="" if base.error is None else f"{type(base.error).__name__}: {base.error}".splitlines()[0],
    )


def leaks_of(steps: ModelSteps) -> tuple[int, ...]:
    """Samples whose inputs change the output for sample 0, in evaluation mode: 1, 2 of 8. To be undone by the caller."""
    inputs = steps.reading.args, dict(steps.reading.kwargs)
    samples = next((len(one) for one in tensors_in(inputs) if one.dim()), 0)
    if samples < 2:  # noqa: PLR2004 - nothing to leak from
        return ()
    steps.model.eval()
    random = RandomState.take()

    def output(given: Any) -> torch.Tensor | None:
        random.put_back()
        with torch.no_grad():
            made = next((one for one in tensors_in(steps.call(*given[0], **given[1])) if one.dim() and len(one) == samples), None)
        return None if made is None else made[0].float()

    plain = output(inputs)
    if plain is None or _same(plain, output(_exchanged(inputs, samples, range(1, samples)))):
        return ()
    return tuple(row for row in range(1, samples) if not _same(plain, output(_exchanged(inputs, samples, [row]))))


def _exchanged(inputs: Any, samples: int, rows: Any) -> Any:
    """The inputs with other values in these rows: those of sample 0, or of a neighbour where these are the same."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or len(tensor) != samples:
            return tensor
        other = tensor.clone()
        for row in rows:
            source = 0 if not torch.equal(tensor[0], tensor[row]) else (row + 1) % samples
            other[row] = tensor[source]
        return other

    return tuple(rebuilt(one, change, (torch.Tensor,)) for one in inputs[0]), {
        name: rebuilt(one, change, (torch.Tensor,)) for name, one in inputs[1].items()
    }


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and bool(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE, equal_nan=True))
