"""The faults of a training, as rows of one table: what must be true of the record, then the headline, the fix and the reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise

from torchdebug_magics.format import listed, number, plural, share
from torchdebug_magics.instruments.gradwatch.record import (
    FIRST_STEPS,
    GradientHistory,
    GradientStep,
    ModuleSeries,
    RunRecord,
)
from torchdebug_magics.instruments.gradwatch.report import GradFinding, GradKind
from torchdebug_magics.instruments.gradwatch.unchanged import (
    fall_of,
    falls,
    finding,
    learning_rate,
    rounded,
    unchanged,
)

_SLOW = 1e-4
"""Ratio of update to weights below which a larger learning rate is advised."""
_EXPLAINED_BY: dict[GradKind, frozenset[GradKind]] = {
    "exploding_spike": frozenset({"ascending", "diverging"}),
    "too_fast": frozenset({"ascending", "diverging"}),
    "diverging": frozenset({"ascending"}),
    "vanishing": frozenset({"dead", "diverging", "too_fast"}),
    "dead": frozenset({"diverging", "not_learning"}),
    "plateau_at_chance": frozenset({"dead", "vanishing", "too_fast", "not_learning", "diverging", "exploding_spike"}),
    "clipped_always": frozenset({"diverging"}),
}
"""What a fault follows from, where both are found in one run."""
_SATURATING = frozenset({"Hardtanh", "LogSigmoid", "Sigmoid", "Softsign", "Tanh"})
_DEAD_STEPS = 8
_FADED, _FEW_STEPS, _FEW_LAYERS, _SMALLEST = 1e-5, 5, 4, 1e-45
_IN_ORDER = 0.8
"""Share of the pairs of layers in which the later one has the larger gradient."""
_FAST_STEPS, _IMPROVED, _THROWN_OFF = 5, 0.9, 1.2
_CLIPPED_STEPS, _CLIPPED_BY = 20, 10.0
_GUESSED_STEPS, _GUESSED = 20, 1.02
_PLATEAU_STEPS, _NEAR_CHANCE, _NO_DROP = 100, 0.01, 0.005
_RUNS = ((2, 1e6), (3, 100.0), (6, 10.0))
"""(steps in a row that grow, growth of the loss over them)"""
_EVEN = 0.3
"""Of the mean growth, in logarithms, that each step has at least."""
_ABOVE_ALL = 3.0
"""How far the loss lies above all that it was before."""
_SPIKE_OF_USUAL, _SPIKE_OF_ALL = 20.0, 5.0
_SPIKE_STEPS, _MOST_SPIKES = 10, 8


class Judge:
    """Looks at each step when it comes, as later the steps before it are gone, and at all that is known when asked."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._divergences: list[tuple[GradientHistory, GradFinding]] = []
        self._spikes: list[tuple[GradientHistory, GradientStep, GradFinding]] = []

    def look(self, history: GradientHistory, largest: ModuleSeries | None) -> None:
        """After a step; `largest` is the module with the largest share of its norm."""
        if not any(known is history for known, _ in self._divergences):
            self._divergences += [(history, fault) for fault in _divergence(history)]
        if len(self._spikes) < _MOST_SPIKES:
            module = None if largest is None else self._record.owners.name(largest.owner)
            self._spikes += [(history, history.steps[-1], fault) for fault in _spike(history, module)]

    def findings(self) -> tuple[GradFinding, ...]:
        """All faults, the worst first, without those that follow from another one."""
        all_of_them = [fault for history, fault in self._divergences if not _has_recovered(history)]
        for spike in [fault for history, step, fault in self._spikes if _is_confirmed(history, step)][:1]:
            many = f" ({len(self._spikes)} such steps)" if len(self._spikes) > 1 else ""
            all_of_them.append(replace(spike, explanation=f"{spike.explanation}{many}"))
        for history in self._record.histories:
            all_of_them += unchanged(self._record, history)
            for rule in _RULES if history.steps else ():
                all_of_them += rule(self._record, history, self._record.modules(history))
        found = {(fault.kind, fault.module, fault.step): fault for fault in all_of_them}.values()
        kinds = {fault.kind for fault in found}
        return tuple(fault for fault in found if not _EXPLAINED_BY.get(fault.kind, frozenset()) & kinds)

    def doubts(self) -> tuple[str, ...]:
        """Why a training without a proven fault is not healthy."""
        trained = [history for history in self._record.histories if history.steps]
        # A schedule may end with one step of rate 0.
        idle = [one for one in trained if one.idle_since is not None and one.steps[-1].number > one.idle_since]
        doubts = [f"the learning rate is 0 from step {one.idle_since} on: the updates since then change nothing" for one in idle[:1]]
        chance = _guesses(trained[0]) if len(trained) == 1 else None  # at equilibrium, the discriminator of a GAN guesses
        if chance is not None:
            doubts.append(f"the loss stays at {chance:.3f} = ln {trained[0].classes}: it does not beat guessing")
        return tuple(doubts)


def _dead(record: RunRecord, history: GradientHistory, modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """Modules on which the loss depends, with a gradient of zeros only, up to the end; not of shards, as another may have the rest."""
    dead = [module for module in modules if module.zero_run >= _DEAD_STEPS and module.is_used and not module.is_sharded]
    if not dead or history.most_rate == 0 or any(step.loss == 0 for step in history.steps):
        return  # nothing is to be learned, or no more: a hinge loss that has reached 0
    names, step = _names(record, dead), min(one.zero_since for one in dead)
    is_relu = any(kind.startswith("ReLU") for kind in dead[-1].owner.kinds) and len(dead) < len(modules)
    others = f" and {plural(len(dead) - 1, 'module')} before it" if len(dead) > 1 else ""
    yield finding(
        "dead",
        history.backward_line or history.line,
        step=step,
        module=names[-1],
        modules=names,
        value=float(dead[-1].zero_run),
        headline=f"zero gradients in {_title(names[-1])}{others} from step {step} on",
        fix=f"replace the ReLU at {_title(names[-1])} with `nn.LeakyReLU(0.01)`, and {learning_rate(history, factor=0.1)}"
        if is_relu
        else "check that nothing rounds or saturates the output, or multiplies it by 0; `%%autograd` shows whether gradients are zeroed "
        f"before `{history.name}.step()`",
        explanation="the loss depends on it, but a derivative of zero between them blocks every gradient; it does not recover by itself",
    )


def _too_fast(record: RunRecord, history: GradientHistory, modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """Updates as large as the weights, long after the first steps, in a training that does not improve."""
    losses, fast = history.losses(), [module for module in modules if module.is_matrix and len(module.paces) >= _FAST_STEPS]
    if history.has_closure or history.is_winding_down or not losses or not fast:
        return
    improves = statistics.median(losses[-10:]) < _IMPROVED * history.first_losses[0]
    if improves or history.most_loss < _THROWN_OFF * history.first_losses[0]:
        return  # or it stands still, but not because it was thrown off
    fast.sort(key=lambda one: -statistics.median(one.paces))
    names, pace = _names(record, fast), statistics.median(fast[0].paces)
    yield finding(
        "too_fast",
        history.line,
        step=fast[0].first_step + FIRST_STEPS,
        modules=names,
        value=pace,
        headline=f"updates are too large: {share(pace)} of the weight norm in {_title(names[0])}",
        fix=learning_rate(history, ratio=pace),
        explanation="0.1% is usual; from about 10% on, each update undoes the previous ones, and the loss does not decrease",
    )


def _vanishing(record: RunRecord, history: GradientHistory, modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """Gradients that shrink from layer to layer towards the input, by a factor that no optimizer was made for."""
    for _, group in groupby(modules, key=lambda one: one.owner.model):
        layers = [one for one in group if one.is_matrix and len(one.recent_norms) >= _FEW_STEPS]
        if len(layers) < _FEW_LAYERS:
            continue
        sizes = [statistics.median(layer.recent_norms) / math.sqrt(layer.count) for layer in layers]
        alive = [size for size in sizes if size > 0]
        largest = max(sizes[-max(1, len(sizes) // 3) :])
        if len(alive) < _FEW_LAYERS - 1 or not sizes[0] < _FADED * largest or not alive[0] < 1e-2 * largest or not math.isfinite(largest):
            continue
        pairs = [later > earlier for earlier, later in combinations(sizes, 2)]
        if sum(pairs) < _IN_ORDER * len(pairs):
            continue
        faded = [layer for layer, size in zip(layers, sizes, strict=True) if size < _FADED * largest]
        names, value = _names(record, faded), max(sizes[0], _SMALLEST) / largest
        used = listed([f"`nn.{kind}()`" for kind in sorted(faded[0].owner.kinds & _SATURATING)])
        yield finding(
            "vanishing",
            history.backward_line or history.line,
            step=faded[0].first_step,
            modules=names,
            value=value,
            headline=f"gradients vanish: at {_title(names[0])}, {value:.0e} of those at the output",
            fix=f"replace {used} with `nn.ReLU()`; or add skip connections or normalization"
            if used
            else "add skip connections, `x + layer(x)`, or normalization, `nn.LayerNorm(width)`, between the layers",
            explanation="each layer multiplies the gradient by a factor below 1, so the layers near the input barely train",
        )
        return


def _plateau(record: RunRecord, history: GradientHistory, modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """The loss of guessing, where the training stays at it; a factor of gradient accumulation is seen through."""
    losses, chance = history.losses(), _chance(history, _PLATEAU_STEPS)
    is_alone = (
        len([history for history in record.histories if history.steps_count > 1]) <= 1
    )  # at equilibrium, the discriminator of a GAN guesses
    if chance is None or not is_alone or history.most_rate == 0:
        return
    losses = losses[-max(_PLATEAU_STEPS, len(losses) // 2) :]
    mean, (drop, error) = statistics.fmean(losses), fall_of(losses)
    is_near = any(abs(mean * times - chance) <= _NEAR_CHANCE * chance for times in {1, history.micro_batches})
    if not is_near or drop + 2 * error > _NO_DROP * mean:
        return
    ratios = [ratio for module in modules if module.is_matrix for ratio in module.recent_ratios]
    usual = statistics.median(ratios) if ratios else math.nan
    advice = "shuffle inputs and labels together, and check with `%overfit model batch` whether the model can learn 8 samples"
    yield finding(
        "plateau_at_chance",
        history.backward_line or history.line,
        step=history.steps[0].number,
        value=chance,
        headline=f"the loss stays at {chance:.3f} = ln {history.classes} (guessing) for {plural(len(history.steps), 'step')}",
        fix=f"{learning_rate(history, ratio=usual)}; or {advice}" if usual < _SLOW else advice,
        explanation="the output does not separate the classes: it carries no information about the label",
    )


def _clipped(_record: RunRecord, history: GradientHistory, _modules: list[ModuleSeries]) -> Iterator[GradFinding]:
    """Clipping that cuts the gradients at each step and by a lot."""
    if history.clips_count < _CLIPPED_STEPS or history.unclipped_count or not history.max_norm > 0:
        return
    usual = statistics.median(step.clipped_from for step in history.steps if step.clipped_from is not None)
    times, is_scaled = usual / history.max_norm, not history.unscaled_count
    if not _CLIPPED_BY <= times < math.inf:
        return
    yield finding(
        "clipped_always",
        history.clip_line or history.line,
        step=history.steps[0].number,
        value=times,
        headline=f"all {history.clips_count:,} gradients are clipped, from norm {number(usual)} to {number(history.max_norm)}",
        fix=f"call `scaler.unscale_({history.name})` before clipping" if is_scaled else f"use `max_norm={rounded(usual):g}`",
        explanation="the clipped gradients are still multiplied by the scale of the GradScaler"
        if is_scaled
        else "clipping is meant for rare large gradients; here it gives all of them the same norm, like a smaller learning rate",
    )


_RULES: tuple[Callable[[RunRecord, GradientHistory, list[ModuleSeries]], Iterator[GradFinding]], ...] = (
    _dead,
    _too_fast,
    _vanishing,
    _plateau,
    _clipped,
)


def _title(module: str) -> str:
    return f"`{module}`" if module else "the model"


def _names(record: RunRecord, modules: Sequence[ModuleSeries]) -> tuple[str, ...]:
    return tuple(record.owners.name(series.owner) for series in modules)


def _chance(history: GradientHistory, steps: int) -> float | None:
    """The loss of guessing among the classes of the loss, where so many steps and their learning rate allow a judgement."""
    is_known = history.classes is not None and history.classes > 1 and len(history.losses()) >= steps and not history.is_warming_up
    return math.log(history.classes) if is_known and history.classes else None


def _guesses(history: GradientHistory) -> float | None:
    """The loss of guessing, where the training ends near it and not clearly below; a factor of gradient accumulation is seen through."""
    losses, chance = history.losses(), _chance(history, _GUESSED_STEPS)
    for times in {1, history.micro_batches} if chance is not None else ():
        last = [times * loss for loss in losses[len(losses) // 2 :]]
        mean, error = statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last))
        if chance is not None and chance - (0 if falls(losses) else 2 * error) <= mean <= _GUESSED * chance:
            return chance
    return None


def _divergence(history: GradientHistory) -> Iterator[GradFinding]:
    """Whether the last steps grow geometrically, in loss and norm."""
    steps = list(history.steps)
    loss = steps[-1].loss
    if history.has_closure or not history.first_losses or not _ABOVE_ALL * max(1e-30, history.first_losses[0]) < loss < math.inf:
        return
    for length, growth in _RUNS:
        window, before = steps[-length - 1 :], steps[:-length]
        if len(window) <= length or not window[0].loss > 0 or loss < growth * window[0].loss or not _is_geometric(window):
            continue
        first, last = window[0], window[-1]
        if loss >= _ABOVE_ALL * max([*(step.loss for step in before if math.isfinite(step.loss)), history.first_losses[0]]):
            factor = (loss / first.loss) ** (1 / max(1, last.number - first.number))
            yield finding(
                "diverging",
                history.line,
                step=first.number,
                last_step=last.number,
                value=factor,
                headline=f"training diverges from step {first.number} on: gradients grow {factor:.3g}x per step",
                fix=f"restart the training, and {learning_rate(history, factor=0.1)}",
                explanation=f"each update increases the loss, to {number(loss)} at step {last.number}; it will become inf or NaN",
            )
        return


def _is_geometric(window: Sequence[GradientStep]) -> bool:
    """Whether both grow at each step, the loss by about the same factor: a single jump is something else."""
    mean = math.log(window[-1].loss / window[0].loss) / (len(window) - 1)
    return all(b.loss > a.loss * math.exp(_EVEN * mean) and b.norm > a.norm for a, b in pairwise(window))


def _has_recovered(history: GradientHistory) -> bool:
    """Whether the loss has come back to where it began."""
    losses = [step.loss for step in history.steps][-5:]
    return bool(history.first_losses) and all(map(math.isfinite, losses)) and min(losses) <= max(history.first_losses)


def _spike(history: GradientHistory, module: str | None) -> Iterator[GradFinding]:
    """Whether the last step's norm is far above the usual and above any before."""
    last = history.steps[-1]
    is_early = history.since <= _SPIKE_STEPS or history.steps_count <= _SPIKE_STEPS
    if is_early or history.has_closure or not _SPIKE_OF_ALL * history.largest_norm < last.norm < math.inf:
        return
    usual = statistics.median(step.norm for step in list(history.steps)[-50:-1])
    if not last.norm > _SPIKE_OF_USUAL * usual > 0:
        return
    times, batch = last.norm / usual, "" if last.batch is None else f", batch {last.batch[1]} of epoch {last.batch[0]}"
    group = f'[p for group in {history.name}.param_groups for p in group["params"]]'
    yield finding(
        "exploding_spike",
        history.backward_line or history.line,
        step=last.number,
        module=module,
        value=times,
        headline=f"gradient norm spike in step {last.number}{batch}: {times:,.0f}x the usual",
        fix=f"clip before `{history.name}.step()`: `torch.nn.utils.clip_grad_norm_({group}, max_norm={rounded(2 * usual):g})`",
        explanation=f"the norm is {number(last.norm)}, usually {number(usual)}: inspect the inputs and labels of this batch",
    )


def _is_confirmed(history: GradientHistory, spike: GradientStep) -> bool:
    """Whether the norm came back after it, or the loss was broken by it: else something else is trained from that step on."""
    after = [step for step in history.steps if step.number > spike.number]
    returns = any(step.norm < spike.norm / _SPIKE_OF_ALL for step in after[:5])
    is_broken = any(not math.isfinite(step.norm) or step.loss > 10 * history.most_loss for step in after[:3])
    return returns or is_broken or len(after) < 3  # noqa: PLR2004 - too early to say
