"""Rules that are asked at the end, or now and then: what has been wrong for many steps and still is."""

from __future__ import annotations

import math
import statistics
from itertools import combinations, groupby
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.gradwatch.module_series import FIRST_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.gradwatch.module_series import Grid, ModuleSeries
    from torchdebug_magics.instruments.gradwatch.step_history import StepHistory

__all__ = ["Suspects", "clipped_always", "dead", "guesses", "is_idle", "not_learning", "plateau", "too_fast", "vanishing"]

_DEAD_STEPS = 8
_FADED, _FEW_STEPS, _FEW_LAYERS, _SMALLEST = 1e-5, 5, 4, 1e-45
_IN_ORDER = 0.8
"""Share of the pairs of layers in which the later one has the larger gradient."""
_STILL, _STILL_STEPS, _TINY_RATE = 1e-6, 20, 1e-5
_FAST_STEPS, _IMPROVED, _THROWN_OFF = 5, 0.9, 1.2
_CLIPPED_STEPS, _CLIPPED_BY = 20, 10.0
_GUESSED_STEPS, _GUESSED = 20, 1.02
_PLATEAU_STEPS, _NEAR_CHANCE, _NO_DROP = 100, 0.01, 0.005


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
