"""Builds findings from the rules: the worst first, each with its line, its fix and its reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby
from typing import NamedTuple

from torchdebug_magics.format import listed, number, plural, share
from torchdebug_magics.instruments.gradwatch.module_series import FIRST_STEPS, Grid, ModuleSeries
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.instruments.gradwatch.run_record import Divergence, RunRecord, Spike, has_recovered, is_spike
from torchdebug_magics.instruments.gradwatch.step_history import StepHistory
from torchdebug_magics.probing.lines import Line
from torchdebug_magics.probing.where import excerpt

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
_USUAL_RATIO = 1e-3
"""Usual ratio of update norm to weight norm."""
_SATURATING = frozenset({"Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh"})
_DEAD_STEPS = 8
_FADED, _FEW_STEPS, _FEW_LAYERS, _SMALLEST = 1e-5, 5, 4, 1e-45
_IN_ORDER = 0.8
"""Share of the pairs of layers in which the later one has the larger gradient."""
_STILL, _STILL_STEPS, _TINY_RATE = 1e-6, 20, 1e-5
_FAST_STEPS, _IMPROVED, _THROWN_OFF = 5, 0.9, 1.2
_CLIPPED_STEPS, _CLIPPED_BY = 20, 10.0
_GUESSED_STEPS, _GUESSED = 20, 1.02
_PLATEAU_STEPS, _NEAR_CHANCE, _NO_DROP = 100, 0.01, 0.005


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
        fix=f"restart the training, and {learning_rate(history, factor=0.1)}",
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
        fix=clip_at(peak.usual_norm, history),
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
        f"replace the ReLU at {_title(names[-1])} with `nn.LeakyReLU(0.01)`, and {learning_rate(history, factor=0.1)}"
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
        fix=activations(suspects.modules[0].owner.kinds),
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
        fix=learning_rate(history, ratio=suspects.value),
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
        else learning_rate(history, ratio=suspects.value or None, factor=None if suspects.value else math.inf),
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
        fix=f"{learning_rate(history, ratio=usual)}; or {advice}" if usual < _SLOW else advice,
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
        fix=f"call `scaler.unscale_({history.name})` before clipping" if is_scaled else f"use `max_norm={rounded(usual):g}`",
        explanation="the clipped gradients are still multiplied by the scale of the GradScaler"
        if is_scaled
        else "clipping is meant for rare large gradients; here it gives all of them the same norm, like a smaller learning rate",
    )


def _title(module: str) -> str:
    return f"`{module}`" if module else "the model"


def _named(record: RunRecord, suspects: Suspects) -> tuple[str, ...]:
    return tuple(record.name(one.owner) for one in suspects.modules)


def rounded(value: float) -> float:
    """The value rounded to one significant digit."""
    return float(f"{value:.0e}") if math.isfinite(value) and value > 0 else value


def learning_rate(history: StepHistory, *, ratio: float | None = None, factor: float | None = None) -> str:
    """A learning rate that gives updates of the usual size, or one changed by a factor."""
    rate = history.moments[-1].rate if history.moments else math.nan
    factor = _USUAL_RATIO / ratio if factor is None and ratio else factor or 0.1
    if not rate > 0 or not math.isfinite(rate * factor):
        return f'set the learning rate: `for group in {history.name}.param_groups: group["lr"] = 1e-3`'
    new = rounded(rate * factor)
    word = "lower" if factor < 1 else "raise"
    return (
        f'{word} the learning rate from {number(rate)} to {number(new)}: `for group in {history.name}.param_groups: group["lr"] = {new:g}`'
    )


def clip_at(usual_norm: float, history: StepHistory) -> str:
    """Clipping at a norm that leaves usual gradients unchanged."""
    limit = rounded(2 * usual_norm)
    group = f'[p for group in {history.name}.param_groups for p in group["params"]]'
    return f"clip before `{history.name}.step()`: `torch.nn.utils.clip_grad_norm_({group}, max_norm={limit:g})`"


def activations(kinds: frozenset[str]) -> str:
    """The fix for gradients that vanish layer by layer."""
    used = sorted(kinds & _SATURATING)
    if used:
        return f"replace {listed([f'`nn.{one}()`' for one in used])} with `nn.ReLU()`; or add skip connections or normalization"
    return "add skip connections, `x + layer(x)`, or normalization, `nn.LayerNorm(width)`, between the layers"


class Suspects(NamedTuple):
    """Modules in the order of the model, since when, and the number that convicts them."""

    modules: list[ModuleSeries]
    step: int
    value: float


def dead(grid: Grid, history: StepHistory) -> Suspects | None:
    """Modules on which the loss depends, with a gradient of zeros only, up to the end; not of shards, as another may have the rest."""
    if history.most_rate == 0 or any(one.loss == 0 for one in history.moments):
        return None  # nothing is to be learned, or no more: a hinge loss that has reached 0
    found = [one for one in grid.ordered() if one.zero_run >= _DEAD_STEPS and one.is_used and not one.is_sharded]
    return Suspects(found, min(one.zero_since for one in found), float(found[-1].zero_run)) if found else None


def vanishing(grid: Grid) -> Suspects | None:
    """Gradients that shrink from layer to layer towards the input, by a factor that no optimizer was made for."""
    for _, group in groupby(grid.ordered(), key=lambda one: one.owner.model):
        layers = [one for one in group if one.is_matrix and len(one.recent_norms) >= _FEW_STEPS]
        if len(layers) < _FEW_LAYERS:
            continue
        sizes = [statistics.median(one.recent_norms) / math.sqrt(one.count) for one in layers]
        alive = [size for size in sizes if size > 0]
        largest = max(sizes[-max(1, len(sizes) // 3) :])
        if len(alive) < _FEW_LAYERS - 1 or not sizes[0] < _FADED * largest or not alive[0] < 1e-2 * largest or not math.isfinite(largest):
            continue
        pairs = [later > earlier for earlier, later in combinations(sizes, 2)]
        if sum(pairs) >= _IN_ORDER * len(pairs):
            faded = [layer for layer, size in zip(layers, sizes, strict=True) if size < _FADED * largest]
            return Suspects(faded, faded[0].first_step, max(sizes[0], _SMALLEST) / largest)
    return None


def not_learning(grid: Grid, history: StepHistory) -> Suspects | None:
    """Updates that change next to nothing, although there are gradients, in a training that does not improve."""
    found = [one for one in grid.ordered() if one.steps_count >= _STILL_STEPS and one.norm_max > 0]
    if not found or history.is_warming_up or (history.is_winding_down and history.most_rate > 0):
        return None
    largest = max(one.ratio_max for one in found)
    if largest < _STILL and history.moments[-1].rate <= _TINY_RATE:
        return None if _falls(history.losses()) else Suspects(found, found[0].first_step, largest)
    unmoved = [one for one in found if one.is_half and one.unmoved_run >= _STILL_STEPS and one.ratio_max == 0]
    return Suspects(unmoved, unmoved[0].first_step, 0.0) if unmoved else None


def too_fast(grid: Grid, history: StepHistory) -> Suspects | None:
    """Updates as large as the weights, long after the first steps, in a training that does not improve."""
    if history.has_closure or history.is_winding_down:
        return None
    losses = history.losses()
    if not losses or statistics.median(losses[-10:]) < _IMPROVED * history.first_losses[0]:
        return None
    if history.most_loss < _THROWN_OFF * history.first_losses[0]:
        return None  # it stands still, but not because it was thrown off
    found = [one for one in grid.ordered() if one.is_matrix and len(one.paces) >= _FAST_STEPS]
    if not found:
        return None
    found.sort(key=lambda one: -statistics.median(one.paces))
    return Suspects(found, found[0].first_step + FIRST_STEPS, statistics.median(found[0].paces))


def clipped_always(history: StepHistory) -> float | None:
    """By how much clipping cuts the gradients, where it does so at each step and by a lot."""
    clipping = history.clipping
    if clipping.steps_count < _CLIPPED_STEPS or clipping.clipped_count < clipping.steps_count or not clipping.max_norm > 0:
        return None
    usual = statistics.median(clipping.totals) / clipping.max_norm
    return usual if usual >= _CLIPPED_BY and math.isfinite(usual) else None


def plateau(history: StepHistory) -> float | None:
    """The loss of guessing, where the training stays at it; a factor of gradient accumulation is seen through."""
    losses, classes = history.losses(), history.classes
    if classes is None or classes < 2 or len(losses) < _PLATEAU_STEPS or history.is_warming_up or history.most_rate == 0:  # noqa: PLR2004
        return None
    losses = losses[-max(_PLATEAU_STEPS, len(losses) // 2) :]
    chance, mean = math.log(classes), statistics.fmean(losses)
    if not any(abs(mean * times - chance) <= _NEAR_CHANCE * chance for times in {1, history.micro_batches}):
        return None
    drop, error = _drop(losses)
    return chance if drop + 2 * error <= _NO_DROP * mean else None


def is_idle(history: StepHistory) -> bool:
    """Whether the last updates changed nothing: a learning rate of 0 in more than the one step with which a schedule may end."""
    return history.idle_since is not None and history.moments[-1].step > history.idle_since


def guesses(history: StepHistory) -> float | None:
    """The loss of guessing, where the training ends near it and not clearly below; a factor of gradient accumulation is seen through."""
    losses, classes = history.losses(), history.classes
    if classes is None or classes < 2 or len(losses) < _GUESSED_STEPS or history.is_warming_up:  # noqa: PLR2004
        return None
    chance, falls = math.log(classes), _falls(losses)
    for times in {1, history.micro_batches}:
        last = [times * loss for loss in losses[len(losses) // 2 :]]
        mean, error = statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last))
        if chance - (0 if falls else 2 * error) <= mean <= _GUESSED * chance:
            return chance
    return None


def _falls(losses: Sequence[float]) -> bool:
    if len(losses) < 4:  # noqa: PLR2004 - of which no half has a deviation
        return False
    drop, error = _drop(losses)
    return drop > 2 * error and drop > 0


def _drop(losses: Sequence[float]) -> tuple[float, float]:
    """(by how much the mean of the second half is lower, its standard error)."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return statistics.fmean(first) - statistics.fmean(second), error
