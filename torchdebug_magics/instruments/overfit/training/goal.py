"""When a training has learned its samples: the loss is close to the least that it can become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from torchdebug_magics.instruments.overfit.training.loss_calls import LossCall

__all__ = ["Goal"]

_SHARE = 0.05
"""Of what is lost by chance: less than that is as good as learned."""
_MOST = 0.1
"""Nats a label: of a large vocabulary, 5 % would still be a wrong word in two."""
_SAME = 0.01
_TIMES = 2.0
"""A first loss that is further above what chance gives is no measure."""
_TINY = 1e-6
_TAIL = 4
"""The trend is that of the last quarter."""
_STATIONARY = 0.01


@dataclass(frozen=True)
class Goal:
    """What the loss is compared with."""

    floor: float
    reference: float
    """Distance from the floor of the first loss, if that is not far above what chance gives."""
    chance: float | None
    is_known: bool
    """Whether the loss is that of PyTorch's functions, and nothing besides."""

    @classmethod
    def of(cls, calls: Sequence[LossCall], total: float, inputs: Sequence[Tensor] = ()) -> Goal:
        """From the loss functions that the first step has called, its loss, and what the model was given."""
        whole = sum(call.value for call in calls)
        scale = next((one for one in (1.0, 1 / max(1, len(calls))) if _is_close(one * whole, total)), None)
        if not calls or scale is None or any(call.is_contrast for call in calls):
            return cls(0.0, abs(total), None, is_known=False)
        chances = [call.chance() for call in calls]
        floor = scale * sum(max(call.floor(), call.floor_of_next_words(inputs)) * call.size for call in calls)
        known = [scale * chance * call.size for chance, call in zip(chances, calls, strict=True) if chance is not None]
        chance = sum(known) if len(known) == len(calls) else None
        usual = (chance if chance is not None else total) - floor
        return cls(floor, min(max(total - floor, usual), _TIMES * usual), chance, is_known=True)

    def learned(self, loss: float, calls: Sequence[LossCall] = ()) -> bool:
        """Whether a step's loss is as good as its floor; of a loss with further terms, whether those are that depend on the targets."""
        if calls and not self.is_known and all(_is_low(call) for call in calls):
            return True
        return self._near(loss, self.floor, self.reference)

    def _near(self, loss: float, floor: float, reference: float) -> bool:
        above = loss - floor
        return math.isfinite(loss) and -_SAME * max(reference, 0.0) - _TINY <= above <= _SHARE * max(reference, 0.0)

    def nearly(self, losses: Sequence[float], quarters: int) -> bool:
        """Whether the loss falls so fast that so many further quarters of the steps are likely to be enough."""
        tail = len(losses) // _TAIL
        if tail < 2 or not all(map(math.isfinite, losses[-2 * tail :])):  # noqa: PLR2004 - a trend needs two values
            return False
        before = sum(losses[-2 * tail : -tail]) / tail - self.floor
        now = sum(losses[-tail:]) / tail - self.floor
        target = _SHARE * self.reference
        if not target > 0 or not 0 < now < before:
            return now <= target
        return math.log(now / target) / math.log(before / now) <= quarters

    def has_converged(self, losses: Sequence[float], share: float = _STATIONARY) -> bool:
        """Whether a loss with further terms has fallen, and in its last quarter by no more than a share of that."""
        tail = len(losses) // _TAIL
        if tail < 2 or not all(map(math.isfinite, losses)):  # noqa: PLR2004 - as above
            return False
        before, now = sum(losses[-2 * tail : -tail]) / tail, sum(losses[-tail:]) / tail
        return losses[0] - now > _SHARE * abs(losses[0]) and abs(before - now) <= share * (losses[0] - now)


def _is_close(one: float, other: float) -> bool:
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= _SAME * max(abs(one), abs(other))


def _is_low(call: LossCall) -> bool:
    chance, value = call.chance(), call.value / call.size
    if not math.isfinite(value):
        return False
    excess = value - call.floor()
    if chance is None:
        return abs(excess) <= _SHARE
    return excess <= min(_SHARE * (chance - call.floor()), _MOST if call.is_classes else math.inf)
