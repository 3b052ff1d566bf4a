"""``%overfit``: train on a few samples, explain a stall, and leave everything as it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError, error_line, refuse
from torchdebug_magics.format import capitalised, number, plural
from torchdebug_magics.instrument import CellContext, Examined
from torchdebug_magics.instruments.overfit.report import LEAVES, OverfitReport, Progress, Trial
from torchdebug_magics.instruments.overfit.subjects import ModelSteps, Subject, samples_in, subject_of
from torchdebug_magics.instruments.overfit.suspects import loss_inputs, model_faults
from torchdebug_magics.instruments.overfit.training.observed_step import NOTHING, TrainingChange
from torchdebug_magics.instruments.overfit.training.training import Training, TrainingEvidence, refuse_sharded
from torchdebug_magics.probing.compiler import eager
from torchdebug_magics.probing.dry_runs.inputs import rebuilt
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held
from torchdebug_magics.probing.source.user_code import excerpt
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.state.snapshot import KeptState
from torchdebug_magics.probing.steps import NEVER_ZEROED, never_held, parameters_of
from torchdebug_magics.probing.tensors import tensors_in

REPEATED = "a training step {}, which every trial would repeat: leave it out of the step, or try it all the same with `--anyway`"
_CLOSE = 1e-4
_HALF, _SOME, _ALMOST = 0.5, 0.1, 0.1
_LONGER, _QUARTERS = 4, 4


def diagnose(seen: TrainingEvidence, stalled: OverfitReport, again: Callable[[TrainingChange, int], Training]) -> OverfitReport:
    """Try the suspects until the training learns; `again` trains from the start with a change, for so many times the steps.

    Faults come before settings that may be meant. A change with which the loss falls, and too slowly, is given more steps at the end.
    """
    trials, base = _Trials(stalled, again), seen.base
    faults = [suspects(seen) for suspects in (model_faults.suspects, loss_inputs.suspects, model_faults.suspects_of_layers)]
    faults += [model_faults.constant_output(seen)] if base.error is None else []
    if any(trials.show(change) for change in chain.from_iterable(faults)):
        return trials.report
    is_open = base.error is None and not trials.report.headline and not trials.slow
    if is_open and base.goal.nearly(base.losses, _QUARTERS) and (longer := again(NOTHING, 2)).learned:
        return replace(trials.report, passed=True, losses=tuple(longer.losses), reason="but only with twice as many steps")
    if trials.report.cause != "output_ignores_input" and any(trials.show(change) for change in _settings(seen)):
        return trials.report
    more = [(change, _LONGER) for change in trials.slow]
    if not trials.report.headline and base.goal.is_known:
        more += [(change, times) for change in model_faults.capacity(seen) for times in (1, _LONGER)]
    if any(trials.show(change, times) for change, times in more) or trials.report.headline:
        return trials.report
    return _without_cause(seen, trials.report)


@dataclass(eq=False)
class _Trials:
    """Those made so far, and what they have shown."""

    report: OverfitReport
    """Its cause is the change that has learned, or a fault that is evident without a trial."""
    again: Callable[[TrainingChange, int], Training]
    slow: list[TrainingChange] = field(default_factory=list)
    """Changes with which more steps are likely to be enough."""

    def show(self, change: TrainingChange, times: int = 1) -> bool:
        """Whether the training learns with a change."""
        if change.is_evident and not self.report.headline:
            self.report = _blaming(self.report, change)
        if not change.can_be_tried:
            return False
        training = self.again(change, times)
        last = training.losses[-1] if training.losses else math.nan
        text, error = change.text or change.fix.replace("`", ""), error_line(training.error)
        trial = Trial(change.suspect, text, last, learns=training.learned, steps=len(training.losses), error=error)
        self.report = replace(self.report, trials=(*self.report.trials, trial))
        if training.learned:
            self.report = _blaming(self.report, change, verified=True, fix_state="verified", cured_losses=tuple(training.losses))
        elif times == 1 and training.goal.nearly(training.losses, _QUARTERS * (_LONGER - 1)):
            self.slow.append(change)
        return training.learned


def _blaming(report: OverfitReport, change: TrainingChange, **shown: Any) -> OverfitReport:
    """The report with a change as its cause and fix."""
    named = {name: getattr(change, name) for name in ("fix", "parameters", "rows", "factor", "location", "module")}
    lines = excerpt(change.location) if change.location is not None else ()
    return replace(report, cause=change.suspect, headline=capitalised(change.headline), excerpt=lines, **named, **shown)


def _without_cause(seen: TrainingEvidence, report: OverfitReport) -> OverfitReport:
    base, goal, trials = seen.base, seen.base.goal, report.trials
    if base.error is not None or not base.losses:
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
        return _blaming(report, model_faults.too_small(seen))
    return replace(report, reason=f"none of {len(trials)} tried changes makes it learn" if trials else "no suspect was found")


def _settings(seen: TrainingEvidence) -> Iterator[TrainingChange]:
    """Yields changes of settings that may be intended in another training."""
    yield from model_faults.frozen(seen)
    base = seen.base
    if base.error is None and base.losses and math.isfinite(base.losses[0]):
        yield from model_faults.update_suspects(seen)
        if base.goal.is_known or not base.goal.has_converged(base.losses):
            yield from model_faults.learning_rates(seen)


def examine(context: CellContext, *values: Any, steps: int = 200, samples: int = 8, anyway: bool = False) -> Examined | None:
    """Train on the first `samples` of a batch for at most `steps`; all is as it was when this returns or raises.

    Raises `TorchDebugError` where the values cannot be trained, or where a step does what cannot be undone and `anyway` is not set. An
    error of the training itself is given back beside the report.
    """
    if not values and not context.keywords:
        return None
    for option, value in (("--steps", steps), ("--samples", samples)):
        refuse(value < 1, f"{option} must be at least 1, not {value}")
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
    assert isinstance(result.report, OverfitReport)
    problems = tuple(dict.fromkeys((*result.report.problems, *guard.problems)))  # with what putting files back has shown
    return replace(result, report=replace(result.report, problems=problems))


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

        training = Training(subject.make_steps, subject.models, times * most_steps, hooks, change, tell)
        trainings.append(training)
        training.run()
        return training

    try:
        base = base if base is not None else trained(NOTHING)
        held = [set(map(id, parameters_of(optimizer))) for optimizer in base.optimizers]
        is_gan = base.first.backwards > 1 and any(first.isdisjoint(second) for first, second in combinations(held, 2))
        refuse(is_gan, "the step minimizes several losses with several optimizers, as a GAN does: there is no single loss to overfit")
        start.put_back()
        samples = subject.samples if subject.samples is not None else base.first.samples
        report = OverfitReport(
            passed=False,
            losses=tuple(base.losses),
            samples=samples,
            floor=base.goal.floor if base.goal.is_known else None,
            chance=base.goal.chance,
            held_still=("the same samples", "the same random numbers", "no dropout"),
            error=error_line(base.error),
        )
        is_trivial = base.losses[:1] == [0] and any(call.is_classes and call.classes == 1 for call in base.first.losses)
        if base.learned and not is_trivial:  # else the loss is 0 for any output of the model
            beside = never_held(base.not_updated) if base.not_updated else NEVER_ZEROED if base.accumulates else ""
            if base.other_loss is not None:
                beside = f"with different random numbers the loss is {number(base.other_loss)}"
                beside = f"{beside}: the model memorized the random draws of the step, such as a shuffle"
            report = replace(report, passed=True, reason=beside and f"but {beside}")
        else:
            unusual = guard.run("looking at the initial weights", model_faults.unusual_weights, base.named_modules()) or {}
            report = diagnose(TrainingEvidence(subject.names, base, start, samples, unusual), report, trained)
            if base.goal.is_known and base.losses and not report.passed:
                report = replace(report, floor_name=base.first.losses[0].stalls_at(base.losses[-1]))
        is_guess = not report.headline or (report.cause == "capacity" and not report.verified)
        if base.accumulates and not report.passed and is_guess:  # a fact, though no training proves that it is the cause
            report = _blaming(report, NOTHING, reason="; ".join(filter(None, (report.reason, NEVER_ZEROED))))
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
    return OverfitReport(passed=False, losses=losses, reason=reason, problems=problems, seconds_s=seconds_s, cut_short="KeyboardInterrupt")


def leaks_of(steps: ModelSteps) -> tuple[int, ...]:
    """Samples whose inputs change the output for sample 0, in evaluation mode: 1, 2 of 8. To be undone by the caller."""
    inputs = steps.reading.args, dict(steps.reading.kwargs)
    samples = samples_in(inputs) or 0
    steps.model.eval()
    random = RandomState.take()

    def output(rows: Sequence[int]) -> torch.Tensor | None:
        """For sample 0, where the inputs have other values in these rows: those of sample 0, or of a neighbour where these are the same."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or len(tensor) != samples:
                return tensor
            other = tensor.clone()
            for row in rows:
                other[row] = tensor[0 if not torch.equal(tensor[0], tensor[row]) else (row + 1) % samples]
            return other

        random.put_back()
        args, kwargs = rebuilt(inputs, change)
        with torch.no_grad():
            outputs = [tensor for tensor in tensors_in(steps.call(*args, **kwargs)) if tensor.dim() and len(tensor) == samples]
        return outputs[0][0].float() if outputs else None

    plain, rows = output([]), range(1, samples)

    def leaks(rows: Sequence[int]) -> bool:
        changed = output(rows)
        return plain is not None and (changed is None or not torch.allclose(plain, changed, rtol=_CLOSE, atol=_CLOSE, equal_nan=True))

    return tuple(row for row in rows if leaks([row])) if leaks(rows) else ()
