"""From what the rules say to findings: the worst first, each with its line, its fix and its reason."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, share
from torchdebug_magics.instruments.gradwatch.report import GradFinding
from torchdebug_magics.instruments.gradwatch.rules import grad_remedies
from torchdebug_magics.instruments.gradwatch.rules.growth_rules import has_recovered, is_spike
from torchdebug_magics.instruments.gradwatch.rules.standing_rules import clipped_always, dead, not_learning, plateau, too_fast, vanishing
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

__all__ = ["found_in", "has_warning"]

_SLOW = 1e-4
"""Of the weights: updates that could be larger."""

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


def _finding(kind: GradKind, line: Line | None, **fields: object) -> GradFinding:
    location = None if line is None else line.location
    return GradFinding(kind=kind, location=location, excerpt=() if location is None else excerpt(location), **fields)  # type: ignore[arg-type]


def _diverging(grown: Divergence, history: StepHistory) -> GradFinding:
    return _finding(
        "diverging",
        history.line,
        step=grown.first_step,
        last_step=grown.last_step,
        module=None,
        value=grown.factor,
        headline=f"loss and gradient norm grow {number(grown.factor)}x per step from step {grown.first_step} on: the training diverges",
        fix=f"start again, and {grad_remedies.learning_rate(history, factor=0.1)}",
        explanation=f"each update makes the loss larger, {number(grown.loss)} at step {grown.last_step}; it ends in inf or NaN",
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
        headline=f"gradient norm {number(moment.norm)} in step {moment.step}{batch}: {times:,.0f}x the usual",
        fix=grad_remedies.clip_at(peak.usual_norm, history),
        explanation=f"one batch moves the weights as far as {times:,.0f} others; look at its inputs and labels"
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
        f"use `nn.LeakyReLU(0.01)` in place of the ReLU at {_title(names[-1])}, and {grad_remedies.learning_rate(history, factor=0.1)}"
        if relu and not everything
        else "check that nothing rounds or saturates the output, or multiplies it by 0; whether something sets gradients to zero before "
        f"`{history.name}.step()`, `%%autograd` tells"
    )
    others = f", and of {plural(len(names) - 1, 'module')} before it" if len(names) > 1 else ""
    return _finding(
        "dead",
        history.backward_line or history.line,
        step=suspects.step,
        module=names[-1],
        modules=names,
        value=suspects.value,
        headline=f"the gradient of {_title(names[-1])} is all zeros from step {suspects.step} on{others}",
        fix=cause,
        explanation="the loss depends on it, but a zero derivative between them stops every gradient; it will not recover by itself",
    )


def _vanishing(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = vanishing(grid)
    if suspects is None:
        return None
    names = _named(record, suspects)
    return _finding(
        "vanishing",
        history.backward_line or history.line,
        step=suspects.step,
        module=names[0],
        modules=names,
        value=suspects.value,
        headline=f"gradients vanish toward the input: at {_title(names[0])} they are {suspects.value:.0e} of those at the output",
        fix=grad_remedies.activations(suspects.modules[0].owner.kinds),
        explanation="each layer multiplies the gradient by a number below 1, so that the first layers all but stand still",
    )


def _too_fast(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = too_fast(grid, history)
    if suspects is None:
        return None
    names = _named(record, suspects)
    return _finding(
        "too_fast",
        history.line,
        step=suspects.step,
        module=names[0],
        modules=names,
        value=suspects.value,
        headline=f"each update changes {_title(names[0])} by {share(suspects.value)} of its norm, and the loss does not fall",
        fix=grad_remedies.learning_rate(history, ratio=suspects.value),
        explanation="0.1% is usual: from about 10% on, an update undoes what the ones before have learned",
    )


def _not_learning(record: RunRecord, grid: Grid, history: StepHistory) -> GradFinding | None:
    suspects = not_learning(grid, history)
    if suspects is None:
        return None
    names, rate = _named(record, suspects), history.moments[-1].rate
    rounds = suspects.value == 0 and rate > 0
    what = "do not change" if suspects.value == 0 else f"change by at most {suspects.value:.0e} of their norm per update"
    why = ", as the learning rate is 0" if rate == 0 else ": updates round to zero" if rounds else ""
    return _finding(
        "not_learning",
        history.line,
        step=suspects.step,
        module=names[0],
        modules=names,
        value=suspects.value,
        headline=f"the weights of {_title(names[0]) if len(names) == 1 else plural(len(names), 'module')} {what}{why}",
        fix="keep the weights in float32, `model.float()`, and use `torch.autocast` for speed"
        if rounds
        else grad_remedies.learning_rate(history, ratio=suspects.value or None, factor=None if suspects.value else math.inf),
        explanation="an update below half a unit in the last place of a weight is lost"
        if rounds
        else "gradients arrive, but the updates made of them are too small for anything to be learned",
    )


def _plateau(record: RunRecord, history: StepHistory) -> GradFinding | None:
    if len([one for one in record.histories if one.steps_count > 1]) > 1:
        return None  # at its balance, the discriminator of a GAN guesses
    chance = plateau(history)
    if chance is None or history.classes is None:
        return None
    moments = list(history.moments)
    ratios = [ratio for one in record.part_of(history).ordered() if one.is_matrix for ratio in one.recent_ratios]
    usual = statistics.median(ratios) if ratios else math.nan
    advice = "shuffle inputs and labels together, and see whether eight samples can be learned: `%overfit model batch`"
    return _finding(
        "plateau_at_chance",
        history.backward_line or history.line,
        step=moments[0].step,
        module=None,
        value=chance,
        headline=f"the loss stays at {chance:.3f} = ln {history.classes}, that of guessing, for {plural(len(moments), 'step')}",
        fix=f"{grad_remedies.learning_rate(history, ratio=usual)}; or {advice}" if usual < _SLOW else advice,
        explanation="the output does not depend on the input in a way that helps to tell the classes apart",
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
        headline=f"clipping cuts every gradient: the norm is {number(usual)} before and {number(clipping.max_norm)} after, at each of "
        f"{plural(clipping.steps_count, 'step')}",
        fix=f"before the clipping: `scaler.unscale_({history.name})`" if is_scaled else f"use `max_norm={grad_remedies.rounded(usual):g}`",
        explanation="the gradients that are clipped still have the factor of the GradScaler"
        if is_scaled
        else "clipping is for rare large gradients: here it makes all of them the same size, like a smaller learning rate",
    )


def _title(module: str) -> str:
    return f"`{module}`" if module else "the model"


def _named(record: RunRecord, suspects: Suspects) -> tuple[str, ...]:
    return tuple(record.name(one.owner) for one in suspects.modules)
