"""What the course of a loss tells: that it rises, falls without bound, stays at the level of guessing, or does not fall."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from torchdebug_magics.format import number, plural
from torchdebug_magics.instruments.gradwatch import record as kept
from torchdebug_magics.instruments.gradwatch import repairs
from torchdebug_magics.instruments.gradwatch.record import GradientHistory
from torchdebug_magics.instruments.gradwatch.repairs import finding
from torchdebug_magics.instruments.gradwatch.report import GradFinding

_SLOW = 1e-4
"""Ratio of update to weights below which a larger learning rate is advised."""
_FAR_BELOW = 10.0
_STANDING_STEPS, _STANDING = 60, 0.95
"""Steps after which a loss is to be lower than at first, and what of it may be left."""
_AS_GOOD_AS = 0.02
"""Share of a loss by which one that has as good as stopped falling still falls, over the second half of a training."""
_SLOWLY = 0.5
"""What is left of a loss that falls slowly."""
FEW_LOSSES, _GUESSED = 20, 1.02
NO_DROP = 0.005
NOT_CONVERGED = 1e-3
"""A loss below it has nothing left to learn."""
_PLATEAU_STEPS, _NEAR_CHANCE = 100, 0.01
_RUNS = ((2, 1e6), (3, 100.0), (6, 10.0))
"""(steps in a row that grow, growth of the loss over them)"""
_EVEN = 0.3
"""Of the mean growth, in logarithms, that each step has at least."""
_ABOVE_ALL = 3.0
"""How far the loss lies above all that it was before."""


def ascending(history: GradientHistory) -> Iterator[GradFinding]:
    """A criterion that has a least value, and that every update increases; not of a GAN, where one model may work against another."""
    values = [abs(loss / history.factor) for loss in history.losses()]
    is_model = history.is_alone and all(steps.owner.model >= 0 for steps in history.parameters.values())
    if is_model and history.factor < 0 and len(values) >= kept.FEW_UPDATES and falls([-value for value in values]):
        headline = f"the updates increase the loss, from {number(values[0])} to {number(values[-1])} in {plural(len(values), 'step')}"
        where, fix = repairs.minimized(history)
        why = f"`{history.name}` maximizes the loss" if history.is_maximizing else "backward() is called on the negative of the loss"
        yield finding(history, "ascending", where, fix, value=values[-1], headline=headline, why=why)


def boundless(history: GradientHistory) -> Iterator[GradFinding]:
    """A loss below 0 that falls ever faster; not of a GAN, where one model may work against another."""
    losses = history.losses()
    is_model = history.is_alone and all(steps.owner.model >= 0 for steps in history.parameters.values())
    if not is_model or history.has_closure or history.factor < 0 or len(losses) < FEW_LOSSES or not falls(losses):
        return
    first, middle, last = statistics.fmean(history.first_losses), losses[len(losses) // 2], losses[-1]
    if last > -_FAR_BELOW * (abs(first) + 1) or losses[0] - middle > middle - last:
        return
    headline = f"the loss falls without bound, from {number(first)} to {number(last)} in {plural(history.steps_count, 'step')}"
    why = "a loss has a least value where the model is right: here a term has the wrong sign, such as a log-probability or a divergence"
    where, fix = repairs.negated(history)
    yield finding(history, "boundless", where, fix, value=last, headline=headline, why=why)


def plateau(history: GradientHistory) -> Iterator[GradFinding]:
    """The loss of guessing, where the training stays at it; a factor of gradient accumulation is seen through."""
    losses, chance = history.losses(), _chance(history, _PLATEAU_STEPS)
    if chance is None or not history.is_alone or history.most_rate == 0:
        return
    losses = losses[-max(_PLATEAU_STEPS, len(losses) // 2) :]
    mean, (drop, error) = statistics.fmean(losses), fall_of(losses)
    is_near = any(abs(mean * times - chance) <= _NEAR_CHANCE * chance for times in {1, max(1, history.last.count)})
    if not is_near or drop + 2 * error > NO_DROP * mean:
        return
    ratios = [ratio for module in history.modules() if module.is_matrix for ratio in module.recent_ratios]
    usual, backward = statistics.median(ratios) if ratios else math.nan, history.last.backward_line
    fix = f"shuffle inputs and labels together, and check with `{repairs.overfit_line(history)}` whether the model can learn 8 samples"
    fix = f"{repairs.rated(history, repairs.usual_rate(history, usual))[1]}; or {fix}" if usual < _SLOW else fix
    headline = f"the loss stays at {chance:.3f} = ln {history.last.classes} (guessing) for {plural(len(history.steps), 'step')}"
    why = "the output does not separate the classes: it carries no information about the label"
    step = history.steps[0].number
    yield finding(history, "plateau_at_chance", backward, fix, step=step, value=chance, headline=headline, why=why)


def falls(losses: Sequence[float]) -> bool:
    """Whether the mean of the second half is lower, by more than chance."""
    if len(losses) < 4:  # noqa: PLR2004 - of which no half has a deviation
        return False
    drop, error = fall_of(losses)
    return drop > 2 * error and drop > 0


def fall_of(losses: Sequence[float]) -> tuple[float, float]:
    """(by how much the mean of the second half is lower, its standard error)."""
    first, second = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return statistics.fmean(first) - statistics.fmean(second), error


def _chance(history: GradientHistory, steps: int) -> float | None:
    """The loss of guessing among the classes of the loss, where so many steps and their learning rate allow a judgement."""
    classes = history.last.classes or 0
    return math.log(classes) if classes > 1 and len(history.losses()) >= steps and not history.is_warming_up else None


def guesses(history: GradientHistory) -> float | None:
    """The loss of guessing, where the training ends near it and not clearly below; a factor of gradient accumulation is seen through."""
    losses, chance = history.losses(), _chance(history, FEW_LOSSES)
    for times in {1, max(1, history.last.count)} if chance is not None else ():
        last = [times * loss for loss in losses[len(losses) // 2 :]]
        mean, error = statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last))
        if chance is not None and chance - (0 if falls(losses) else 2 * error) <= mean <= _GUESSED * chance:
            return chance
    return None


def stands(history: GradientHistory) -> tuple[float, float] | None:
    """(the loss in the first steps, in the last ones) where it has not fallen; a loss that may be negative tells nothing."""
    losses = history.losses()
    if history.steps_count < _STANDING_STEPS or not losses or min(losses) <= 0 or history.is_warming_up:
        return None
    if falls(losses) and fall_of(losses)[0] > NO_DROP * losses[0]:
        return None
    first, last = statistics.fmean(history.first_losses), statistics.fmean(losses[-len(losses) // 4 :])
    chance = 2 * statistics.stdev(losses) / math.sqrt(len(history.first_losses))  # of batches whose losses differ
    return (first, last) if last > min(_STANDING * first, first - chance) and last / history.factor > NOT_CONVERGED else None


def level_of(losses: Sequence[float | None], history: GradientHistory) -> tuple[float, float] | None:
    """(the loss in the first quarter, in the last one) of a training that has stopped falling: the quarter before was as low, or nearly.

    None while it falls, and of one that has converged; `losses` are those of the whole run, as a few steps tell little of those of batches.
    """
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if history.steps_count < _STANDING_STEPS or not known or min(known) <= 0 or history.factor < 0 or history.is_warming_up:
        return None
    half = known[len(known) // 2 :]
    last, (drop, error) = statistics.fmean(half[len(half) // 2 :]), fall_of(half)
    has_stopped = drop < max(2 * error, _AS_GOOD_AS * last) and last / history.factor > NOT_CONVERGED
    return (statistics.fmean(known[: len(known) // 4]), last) if has_stopped else None


def slow_level(losses: Sequence[float | None], history: GradientHistory) -> float | None:
    """The loss in the last quarter of a training in which it fell by less than half; None where it fell further, or tells nothing."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if history.steps_count < _STANDING_STEPS or not known or min(known) <= 0 or history.factor < 0 or history.is_warming_up:
        return None
    last = statistics.fmean(known[-max(1, len(known) // 4) :])
    return last if last > _SLOWLY * statistics.fmean(history.first_losses) and last / history.factor > NOT_CONVERGED else None


def divergence(history: GradientHistory) -> Iterator[GradFinding]:
    """Whether the last steps grow geometrically, each of them in loss and norm: a single jump is something else."""
    steps = list(history.steps)
    loss = steps[-1].loss
    if history.has_closure or not history.first_losses or not _ABOVE_ALL * max(1e-30, history.first_losses[0]) < loss < math.inf:
        return
    for length, growth in _RUNS:
        window, before = steps[-length - 1 :], steps[:-length]
        first, last = window[0], window[-1]
        if len(window) <= length or not first.loss > 0 or loss < growth * first.loss:
            continue
        least = math.exp(_EVEN * math.log(loss / first.loss) / length)
        if not all(later.loss > earlier.loss * least and later.norm > earlier.norm for earlier, later in pairwise(window)):
            continue
        if loss >= _ABOVE_ALL * max([*(step.loss for step in before if math.isfinite(step.loss)), history.first_losses[0]]):
            factor, step = (loss / first.loss) ** (1 / max(1, last.number - first.number)), first.number
            headline = f"training diverges from step {step} on: gradients grow {factor:.3g}x per step"
            why = f"each update increases the loss, to {number(loss)} at step {last.number}; it will become inf or NaN"
            where, fix = repairs.rated(history, repairs.rounded(history.steps[-1].rate / 10))
            say = partial(finding, history, "diverging", where, f"restart the training, and {fix}", step=step, last_step=last.number)
            yield say(value=factor, headline=headline, why=why)
        return
