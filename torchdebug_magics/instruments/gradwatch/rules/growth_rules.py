"""Rules that look at each step as it comes: a training that diverges, and a single step whose gradient explodes."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.instruments.gradwatch.module_owners import Owner
    from torchdebug_magics.instruments.gradwatch.step_history import Moment, StepHistory

__all__ = ["Divergence", "Spike", "divergence", "has_recovered", "is_spike", "spike"]

_RUNS = ((2, 1e6), (3, 100.0), (6, 10.0))
"""(steps in a row that grow, growth of the loss over them)"""
_TREND, _CORRELATION = 24, 0.9
"""Steps of a trend that is noisy."""
_EVEN = 0.3
"""Of the mean growth, in logarithms, that each step has at least."""
_ABOVE_ALL = 3.0
"""How far the loss lies above all that it was before."""
_SPIKE_OF_USUAL, _SPIKE_OF_ALL = 20.0, 5.0
_HISTORY = 10


@dataclass(frozen=True)
class Divergence:
    """Loss and gradient norm grow by about the same factor at each step."""

    first_step: int
    last_step: int
    factor: float
    loss: float


@dataclass(frozen=True)
class Spike:
    """One step whose gradient norm is far above that of all steps before it."""

    moment: Moment
    usual_norm: float
    module: Owner | None


def divergence(history: StepHistory) -> Divergence | None:
    """Whether the last steps grow geometrically, in loss and norm; asked after each step."""
    moments = history.moments
    last = moments[-1]
    if history.has_closure or not math.isfinite(last.loss) or not history.first_losses:
        return None
    if not last.loss > _ABOVE_ALL * max(1e-30, *history.first_losses[:1]):
        return None
    recent = list(moments)
    for length, growth in _RUNS:
        window = recent[-length - 1 :]
        if len(window) > length and window[0].loss > 0 and last.loss >= growth * window[0].loss and _is_geometric(window):
            return _told(window, _largest_before(history, length))
    window = recent[-_TREND:]
    if len(window) == _TREND and history.steps_count % 4 == 0 and _is_trend(window):
        return _told(window, _largest_before(history, _TREND))
    return None


def has_recovered(history: StepHistory) -> bool:
    """Whether the loss has come back to where it began."""
    losses = [one.loss for one in history.moments][-5:]
    return bool(history.first_losses) and all(math.isfinite(one) for one in losses) and min(losses) <= max(history.first_losses)


def spike(history: StepHistory, module: Owner | None) -> Spike | None:
    """Whether the last step's norm is far above the usual and above any before; `module` has the largest share of it."""
    if history.since <= _HISTORY or history.has_closure or history.steps_count <= _HISTORY:
        return None
    last = history.moments[-1]
    if not math.isfinite(last.norm) or last.norm <= _SPIKE_OF_ALL * history.largest_norm:
        return None
    usual = statistics.median(one.norm for one in list(history.moments)[-50:-1])
    return Spike(last, usual, module) if last.norm > _SPIKE_OF_USUAL * usual > 0 else None


def is_spike(found: Spike, history: StepHistory) -> bool:
    """Whether the norm came back after it, or the loss was broken by it: else something else is trained from that step on."""
    after = [one for one in history.moments if one.step > found.moment.step]
    returns = any(one.norm < found.moment.norm / _SPIKE_OF_ALL for one in after[:5])
    broken = any(not math.isfinite(one.norm) or one.loss > 10 * history.most_loss for one in after[:3])
    return returns or broken or len(after) < 3  # noqa: PLR2004 - too early to say


def _is_geometric(window: Sequence[Moment]) -> bool:
    """Whether both grow at each step, the loss by about the same factor: a single jump is something else."""
    mean = math.log(window[-1].loss / window[0].loss) / (len(window) - 1)
    grows = (b.loss > a.loss * math.exp(_EVEN * mean) and b.norm > a.norm for a, b in pairwise(window))
    return all(grows)


def _is_trend(window: Sequence[Moment]) -> bool:
    if any(not (one.loss > 0 and one.norm > 0 and math.isfinite(one.norm)) for one in window):
        return False
    losses, norms = [math.log(one.loss) for one in window], [math.log(one.norm) for one in window]
    if losses[-1] - losses[0] < math.log(_RUNS[-1][1]) or norms[-1] - norms[0] < math.log(_ABOVE_ALL):
        return False
    steps = range(len(window))
    return statistics.correlation(steps, losses) > _CORRELATION and statistics.correlation(steps, norms) > _CORRELATION


def _largest_before(history: StepHistory, length: int) -> float:
    losses = [one.loss for one in list(history.moments)[:-length] if math.isfinite(one.loss)]
    return max([*losses, *history.first_losses[:1]], default=0.0)


def _told(window: Sequence[Moment], largest: float) -> Divergence | None:
    first, last = window[0], window[-1]
    if last.loss < _ABOVE_ALL * largest:
        return None
    factor = (last.loss / first.loss) ** (1 / max(1, last.step - first.step))
    return Divergence(first.step, last.step, factor, last.loss)
