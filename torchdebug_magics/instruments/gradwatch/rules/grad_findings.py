"""Builds findings from the rules: the worst first, each with its line, its fix and its reason."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, share
from torchdebug_magics.instruments.gradwatch.report import GradFinding
from torchdebug_magics.instruments.gradwatch.rules import grad_remedies
from torchdebug_magics.instruments.gradwatch.rules.growth_rules import has_recovered, is_spike
from torchdebug_magics.instruments.gradwatch.rules.standing_rules import (
    clipped_always,
    dead,
    guesses,
    is_idle,
    not_learning,
    plateau,
    too_fast,
    vanishing,
)
from torchdebug_magics.probing.where import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.gradwatch.module_series import Grid
    from torchdebug_magics.instruments.gradwatch.report import GradKind
    from torchdebug_magics.instruments.gradwatch.rules.growth_rules import Divergence, Spike
    from torchdebug_magics.instruments.gradwatch.rules.standing_rules import Suspects
    from torchdebug_magics.instruments.gradwatch.run_record import RunRecord
    from torchdebug_magics.instruments.gradwatch.step_history import StepHistory
    from torchdebug_magics.probing.lines import Line

__all__ = ["doubts_in", "found_in", "has_warning"]

_SLOW = 1e-4
"""Ratio of update to weights below which a larger learning rate is advised."""

_EXPLAINED_BY: dict[GradKind, frozenset[GradKind]] = {
    "exploding_spike": frozenset({"diverging"}),
    "too_fast": frozenset({"diverging"}),
    "vanishing": frozenset({"dead", "diverging", "too_fast"}),
    "dead": frozenset({"diverging"}),
    "not_learning": frozenset({"dead"}),
    "plateau_at_chance": frozenset({"dead", "vanishing", "too_fast", "not_learning", "diverging", "exploding_spike"}),
    "clipped_always": frozenset({"diverging"}),
}
"""What a fault follows from, where both are found in one run."""


def found_in(record: RunRecord) -> tuple[GradFinding, ...]:
    """All faults, without those that follow from another one."""
    found = list({(one.kind, one.module, one.step): one for one in _all(record) if one is not None}.values())
    kinds = {one.kind for one in found}
    return tuple(one for one in found if not _EXPLAINED_BY.get(one.kind, frozenset()) & kinds)


def has_warning(record: RunRecord) -> str:
    """The first fault in one line, while the session goes on."""
    found = found_in(record)
    return found[0].headline if found else ""


def _all(record: RunRecord) -> Iterator[GradFinding | None]:
    yield from (_diverging(*one) for one in record.divergences if not has_recovered(one[1]))
    spikes = [one for one in record.spikes if is_spike(*one)]
    yield _spike(record, *spikes[0]) if spikes else None
    for history in record.histories:
        if history.moments:
            own = record.part_of(history)
            yield from (_dead(record, own, history), _too_fast(record, own, history), _vanishing(record, own, history))
            yield from (_not_learning(record, own, history), _plateau(record, history), _clipped(history))


def doubts_in(record: RunRecord) -> tuple[str, ...]:
    """Why a training without a proven fault is not healthy."""
    trained = [one for one in record.histories if one.moments]
    idle = [one for one in trained if is_idle(one)]
    doubts = [f"the learning rate is 0 from step {one.idle_since} on: the updates since then change nothing" for one in idle[:1]]
    chance = guesses(trained[0]) if len(trained) == 1 else None  # at equilibrium, the discriminator of a GAN guesses
    if chance is not None:
        doubts.append(f"the loss stays at {chance:.3f} = ln {trained[0].classes}: it does not beat guessing")
    return tuple(doubts)


def _finding(kind: GradKind, line: Line | None, **fields: object) -> GradFinding:
    location = None if line is None else line.location
    return GradFinding(kind=kind, location=location, excerpt=() if location is None else excerpt(location), **fields)  # type: ignore[arg-type]


def _in_modules(
    kind: GradKind, line: Line | None, suspects: Suspects, names: tuple[str, ...], *, module: str | None = None, **words: str
) -> GradFinding:
    """A finding about several modules; headed by the first of them, unless `module` names another."""
    return _finding(
        kind, line, step=suspects.step, module=names[0] if module is None else module, modules=names, value=suspects.value, **words
    )


def _diverging(grown: Divergence, history: StepHistory) -> GradFinding:
    return _finding(
        "diverging",
        history.line,
        step=grown.first_step,
        last_step=grown.last_step,
        module=None,
        value=grown.factor,
        headline=f"training diverges from step {grown.first_step} on: gradients grow {grown.factor:.3g}x per step",
        fix=f"restart the training, and {grad_remedies.learning_rate(history, factor=0.1)}",
        explanation=f"each update increases the loss, to {number(grown.loss)} at step {grown.last_step}; it will become inf or NaN",
    )


def _spike(record: RunRecord, peak: Spike, history: StepHistory) -> GradFinding:
    moment, times = peak.moment, peak.moment.norm / peak.usual_norm
    batch = "" if moment.batch is None else f", batch {moment.batch[1]} of epoch {moment.batch[0]}"
    return _finding(
        "exploding_spike",
        history.backward_line or history.line,
        step=moment.step,
        module=None if peak.module is None else record.name(peak.module),
        value=times,
        headline=f"gradient norm spike in step {moment.step}{batch}: {times:,.0f}x the usual",
        fix=grad_remedies.clip_at(peak.usual_norm, history),
        explanation=f"the norm is {number(moment.norm)}, usually {number(peak.usual_norm)}: inspect the inputs and labels of this batch"
        + (f" ({len(record.spikes)} such steps)" if len(record.spikes) > 1 else ""),
    )


def _dead(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = dead(grid, history)
    if suspects is None:
        return None
    worst, names = suspects.modules[-1], _named(record, suspects)
    relu = {one for one in worst.owner.kinds if one.startswith("ReLU")}
    everything = len(suspects.modules) == len([one for one in grid.ordered() if one.steps_count])
    cause = (
        f"replace the ReLU at {_title(names[-1])} with `nn.LeakyReLU(0.01)`, and {grad_remedies.learning_rate(history, factor=0.1)}"
        if relu and not everything
        else "check that nothing rounds or saturates the output, or multiplies it by 0; `%%autograd` shows whether gradients are zeroed "
        f"before `{history.name}.step()`"
    )
    others = f" and {plural(len(names) - 1, 'module')} before it" if len(names) > 1 else ""
    return _in_modules(
        "dead",
        history.backward_line or history.line,
        suspects,
        names,
        module=names[-1],
        headline=f"zero gradients in {_title(names[-1])}{others} from step {suspects.step} on",
        fix=cause,
        explanation="the loss depends on it, but a derivative of zero between them blocks every gradient; it does not recover by itself",
    )


def _vanishing(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = vanishing(grid)
    if suspects is None:
        return None
    names = _named(record, suspects)
    return _in_modules(
        "vanishing",
        history.backward_line or history.line,
        suspects,
        names,
        headline=f"gradients vanish: at {_title(names[0])}, {suspects.value:.0e} of those at the output",
        fix=grad_remedies.activations(suspects.modules[0].owner.kinds),
        explanation="each layer multiplies the gradient by a factor below 1, so the layers near the input barely train",
    )


def _too_fast(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = too_fast(grid, history)
    if suspects is None:
        return None
    names = _named(record, suspects)
    return _in_modules(
        "too_fast",
        history.line,
        suspects,
        names,
        headline=f"updates are too large: {share(suspects.value)} of the weight norm in {_title(names[0])}",
        fix=grad_remedies.learning_rate(history, ratio=suspects.value),
        explanation="0.1% is usual; from about 10% on, each update undoes the previous ones, and the loss does not decrease",
    )


def _not_learning(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = not_learning(grid, history)
    if suspects is None:
        return None
    names, rate = _named(record, suspects), history.moments[-1].rate
    rounds = suspects.value == 0 and rate > 0
    what = "do not change" if suspects.value == 0 else f"change by at most {suspects.value:.0e} of their norm per update"
    why = ": the learning rate is 0" if rate == 0 else ": updates round to zero" if rounds else ""
    return _in_modules(
        "not_learning",
        history.line,
        suspects,
        names,
        headline=f"weights of {_title(names[0]) if len(names) == 1 else plural(len(names), 'module')} {what}{why}",
        fix="keep the weights in float32, `model.float()`, and use `torch.autocast` for speed"
        if rounds
        else grad_remedies.learning_rate(history, ratio=suspects.value or None, factor=None if suspects.value else math.inf),
        explanation="an update below half a unit in the last place of a weight is lost"
        if rounds
        else "the gradients are not zero, but the updates are too small to change the model",
    )


def _plateau(record: RunRecord, history: StepHistory) -> GradFinding | None:
    if len([one for one in record.histories if one.steps_count > 1]) > 1:
        return None  # at equilibrium, the discriminator of a GAN guesses
    chance = plateau(history)
    if chance is None or history.classes is None:
        return None
    moments = list(history.moments)
    ratios = [ratio for one in record.part_of(history).ordered() if one.is_matrix for ratio in one.recent_ratios]
    usual = statistics.median(ratios) if ratios else math.nan
    advice = "shuffle inputs and labels together, and check with `%overfit model batch` whether the model can learn 8 samples"
    return _finding(
        "plateau_at_chance",
        history.backward_line or history.line,
        step=moments[0].step,
        module=None,
        value=chance,
        headline=f"the loss stays at {chance:.3f} = ln {history.classes} (guessing) for {plural(len(moments), 'step')}",
        fix=f"{grad_remedies.learning_rate(history, ratio=usual)}; or {advice}" if usual < _SLOW else advice,
        explanation="the output does not separate the classes: it carries no information about the label",
    )


def _clipped(history: StepHistory) -> GradFinding | None:
    times = clipped_always(history)
    if times is None:
        return None
    clipping, usual = history.clipping, statistics.median(history.clipping.totals)
    is_scaled = clipping.scaled_count == clipping.steps_count
    return _finding(
        "clipped_always",
        clipping.line or history.line,
        step=history.moments[0].step,
        module=None,
        value=times,
        headline=f"all {clipping.steps_count:,} gradients are clipped, from norm {number(usual)} to {number(clipping.max_norm)}",
        fix=f"call `scaler.unscale_({history.name})` before clipping" if is_scaled else f"use `max_norm={grad_remedies.rounded(usual):g}`",
        explanation="the clipped gradients are still multiplied by the scale of the GradScaler"
        if is_scaled
        else "clipping is meant for rare large gradients; here it gives all of them the same norm, like a smaller learning rate",
    )


def _title(module: str) -> str:
    return f"`{module}`" if module else "the model"


def _named(record: RunRecord, suspects: Suspects) -> tuple[str, ...]:
    return tuple(record.name(one.owner) for one in suspects.modules)
