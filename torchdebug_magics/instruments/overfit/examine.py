"""``%overfit``: train on a few samples, explain a stall, and leave everything as it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import listed, number, plural
from torchdebug_magics.instrument import CellContext, Examined
from torchdebug_magics.instruments.overfit.batches import refuse_sharded
from torchdebug_magics.instruments.overfit.report import LEAVES, OverfitReport, Progress, Trial
from torchdebug_magics.instruments.overfit.subjects import ModelSteps, Subject, subject_of
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, parameter_faults, units
from torchdebug_magics.instruments.overfit.suspects.suspect_evidence import TrainingEvidence
from torchdebug_magics.instruments.overfit.suspects.units import unusual_weights
from torchdebug_magics.instruments.overfit.training.change import NOTHING, TrainingChange
from torchdebug_magics.instruments.overfit.training.training import Training
from torchdebug_magics.probing.compiler import eager
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.source.user_code import excerpt
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.snapshot import KeptState
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.probing.tensors import tensors_in

_ACCUMULATE = "gradients accumulate over the steps: zero_grad() is missing"
REPEATED = "a training step {}, which every trial would repeat: leave it out of the step, or try it all the same with `--anyway`"
_CLOSE = 1e-4
_HALF, _SOME, _ALMOST = 0.5, 0.1, 0.1
_LONGER, _QUARTERS = 4, 4


def diagnose(seen: TrainingEvidence, stalled: OverfitReport, again: Callable[[TrainingChange, int], Training]) -> OverfitReport:
    """Try the suspects until the training learns; `again` trains from the start with a change, for so many times the steps.

    Faults come before settings that may be meant. A change with which the loss falls, and too slowly, is given more steps at the end.
    """
    trials, goal = _Trials(stalled, again), seen.base.goal
    for stage in (_faults, _settings):
        for change in stage(seen):
            if trials.show(change):
                return trials.report
        if trials.report.cause == "output_ignores_input":
            break
        if stage is _faults and not trials.report.headline and not trials.slow and _is_slow(seen, again):
            losses = tuple(seen.base.losses)
            return replace(trials.report, passed=True, losses=losses, reason="but only with twice as many steps")
    longer = [(change, _LONGER) for change in trials.slow]
    if not trials.report.headline and goal is not None and goal.is_known:
        longer += [(change, times) for change in units.capacity(seen) for times in (1, _LONGER)]
    if any(trials.show(change, times) for change, times in longer) or trials.report.headline:
        return trials.report
    return _without_cause(seen, trials.report)


class _Trials:
    """Those made so far, and what they have shown."""

    def __init__(self, stalled: OverfitReport, again: Callable[[TrainingChange, int], Training]) -> None:
        self._again = again
        self.report = stalled
        """Its cause is the change that has learned, or a fault that is evident without a trial."""
        self.slow: list[TrainingChange] = []
        """Changes with which more steps are likely to be enough."""

    def show(self, change: TrainingChange, times: int = 1) -> bool:
        """Whether the training learns with a change."""
        if change.is_evident and not self.report.headline:
            self.report = _blaming(self.report, change)
        if not change.can_be_tried:
            return False
        training = self._again(change, times)
        trial = Trial(
            suspect=change.suspect,
            change=change.text,
            last_loss=training.losses[-1] if training.losses else math.nan,
            learns=training.learned,
            steps=len(training.losses),
            error=_first_line(training.error),
        )
        self.report = replace(self.report, trials=(*self.report.trials, trial))
        if training.learned:
            self.report = _blaming(self.report, change, verified=True, fix_state="verified", cured_losses=tuple(training.losses))
        elif times == 1 and training.goal is not None and training.goal.nearly(training.losses, _QUARTERS * (_LONGER - 1)):
            self.slow.append(change)
        return training.learned


def _blaming(report: OverfitReport, change: TrainingChange, **shown: Any) -> OverfitReport:
    """The report with a change as its cause and fix."""
    named = {name: getattr(change, name) for name in ("headline", "fix", "parameters", "rows", "factor", "location", "module")}
    lines = excerpt(change.location) if change.location is not None else ()
    return replace(report, cause=change.suspect, excerpt=lines, **named, **shown)


def _first_line(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _is_slow(seen: TrainingEvidence, again: Callable[[TrainingChange, int], Training]) -> bool:
    """Whether it learns with twice as many steps; then these are what is shown."""
    goal = seen.base.goal
    if seen.base.error is not None or goal is None or not goal.nearly(seen.base.losses, _QUARTERS):
        return False
    longer = again(NOTHING, 2)
    if longer.learned:
        seen.base.losses = longer.losses
    return longer.learned


def _without_cause(seen: TrainingEvidence, report: OverfitReport) -> OverfitReport:
    base, goal, trials = seen.base, seen.base.goal, report.trials
    if base.error is not None or goal is None or not base.losses:
        return report
    if not math.isfinite(base.losses[0]):
        names_it = "`%%torchdebug` above a cell that computes the loss names the op"
        return replace(report, reason=f"the first loss is not finite, so no setting of the training is at fault; {names_it}")
    fell = base.losses[0] - base.losses[-1]
    best = min((trial.last_loss for trial in trials if trial.suspect != "capacity" and math.isfinite(trial.last_loss)), default=math.inf)
    is_lowest = base.losses[-1] - best <= _SOME * fell and goal.has_converged(base.losses, _ALMOST)
    if not goal.is_known and (fell > _HALF * abs(base.losses[0]) or is_lowest):
        return replace(report, passed=True, reason="the loss has other terms, and no change brings it to zero")
    if goal.is_known and math.isfinite(fell) and fell > _SOME * abs(base.losses[0] - goal.floor):
        return _blaming(report, units.too_small(seen))
    return replace(report, reason=f"none of {len(trials)} tried changes makes it learn" if trials else "no suspect was found")


def _faults(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes that repair what is wrong in any training."""
    for suspects in (parameter_faults.suspects, loss_inputs.suspects, units.suspects):
        yield from suspects(seen)
    if seen.base.error is None:
        yield from units.constant_output(seen)


def _settings(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes of settings that may be intended in another training."""
    yield from parameter_faults.frozen(seen)
    if seen.base.error is not None or seen.base.goal is None or not math.isfinite(seen.base.losses[0]):
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

    try:
        with effects.trial():
            with _undone(hooks, before):
                subject = subject_of(values, context.names, context.keywords, samples)
            start = KeptState(subject.roots, guard, effects)
            with _undone(hooks, start, before), eager():
                result = explained(subject, steps, start, guard, hooks, context.progress)
    except Irrevocable as act:
        raise TorchDebugError(str(act)) from None
    finally:
        effects.finish()
    report = result.report
    if report is not None:  # with what putting files back has shown
        report = replace(report, problems=tuple(dict.fromkeys((*report.problems, *guard.problems))))
    return replace(result, report=report)


@contextmanager
def _undone(hooks: Hooks, *states: KeptState) -> Iterator[None]:
    try:
        yield
    finally:
        with interrupts_held():
            hooks.sweep()
            for state in states:
                state.put_back()


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

    def trained(change: TrainingChange, times: int = 1) -> Training:
        start.put_back()
        doing = "training" if not trainings else change.text or "more steps"

        def tell(losses: list[float]) -> None:
            if len(losses) == 1:
                start.effects.attribute()
            progress(Progress(doing, tuple(losses)))

        training = Training(subject.steps, times * most_steps, hooks, change, tell)
        trainings.append(training)
        seen.trial[:] = [training]
        training.run()
        return training

    seen = TrainingEvidence(subject.names, start)
    try:
        seen.base = base = base if base is not None else trained(NOTHING)
        _refuse_rivals(base)
        start.put_back()
        seen.look(subject.samples)
        if not base.learned:
            seen.unusual = guard.run("looking at the initial weights", unusual_weights, base.named_modules()) or {}
        report = _report(base, seen.samples)
        is_trivial = base.losses[:1] == [0] and any(call.is_classes and call.classes == 1 for call in base.first.losses)
        if base.learned and not is_trivial:  # else the loss is 0 for any output of the model
            report = replace(report, passed=True, reason=_beside(base))
        else:
            report = diagnose(seen, report, trained)
            report = report if report.passed else replace(report, floor_name=_stalls_at(base))
        is_guess = not report.headline or (report.cause == "capacity" and not report.verified)
        if base.accumulates and not report.passed and is_guess:  # a fact, though no training proves that it is the cause
            report = _blaming(report, NOTHING, reason="; ".join(filter(None, (report.reason, _ACCUMULATE))))
        start.put_back()
        steps = subject.model if base.error is None else None
        leaks = guard.run("looking for leaks between samples", leaks_of, steps) if steps is not None else ()
        took_s = time.monotonic() - began_s
        report = replace(report, leaks=leaks or (), notes=subject.notes, seconds_s=took_s, problems=tuple(guard.problems))
        return Examined(report, None if report.headline else base.error)
    except KeyboardInterrupt as stop:
        return Examined(stopped(trainings, tuple(guard.problems), time.monotonic() - began_s), stop)


def stopped(trainings: Sequence[Training], problems: tuple[str, ...], seconds_s: float = 0.0) -> OverfitReport:
    """The report of trainings that an interrupt has ended."""
    losses = tuple(trainings[0].losses) if trainings else ()
    trials = f" and {plural(len(trainings) - 1, 'trial')}" if len(trainings) > 1 else ""
    reason = f"after {plural(len(losses), 'step')}{trials}; {LEAVES}"
    cut_short = KeyboardInterrupt.__name__
    return OverfitReport(passed=False, losses=losses, reason=reason, problems=problems, seconds_s=seconds_s, cut_short=cut_short)


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


def _report(base: Training, samples: int | None) -> OverfitReport:
    """The training alone, before any trial."""
    goal = base.goal
    return OverfitReport(
        passed=False,
        losses=tuple(base.losses),
        samples=samples,
        floor=goal.floor if goal is not None and goal.is_known else None,
        chance=goal.chance if goal is not None else None,
        held_still=("the same samples", "the same random numbers", "no dropout"),
        error=_first_line(base.error),
    )


def _stalls_at(base: Training) -> str:
    """What the last loss is called, where it is one at which a faulty training stalls."""
    known = base.first.losses[0].known_values() if base.goal is not None and base.goal.is_known and base.first.losses else {}
    return next((name for name, value in known.items() if base.losses and abs(base.losses[-1] - value) <= 0.01 * value), "")


def leaks_of(steps: ModelSteps) -> tuple[int, ...]:
    """Samples whose inputs change the output for sample 0, in evaluation mode: 1, 2 of 8. To be undone by the caller."""
    inputs = steps.reading.args, dict(steps.reading.kwargs)
    samples = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    if samples < 2:  # noqa: PLR2004 - nothing to leak from
        return ()
    steps.model.eval()
    random = RandomState.take()

    def output(given: Any) -> torch.Tensor | None:
        random.put_back()
        with torch.no_grad():
            made = next(
                (tensor for tensor in tensors_in(steps.call(*given[0], **given[1])) if tensor.dim() and len(tensor) == samples), None
            )
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

    return rebuilt(inputs, change)


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and bool(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE, equal_nan=True))
