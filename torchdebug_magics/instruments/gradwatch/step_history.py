"""What is kept of each optimizer: its last steps, and how loss, norm and learning rate went over all of them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.probing.lines import Line

__all__ = ["Clipping", "Moment", "StepHistory"]

_RECENT = 256


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of one optimizer."""

    step: int
    loss: float
    """NaN where it is not known, or is NaN."""
    norm: float
    rate: float
    batch: tuple[int, int] | None = None
    """(epoch, batch) of the DataLoader."""


@dataclass
class Clipping:
    """What `clip_grad_norm_` did over all steps."""

    line: Line | None = None
    steps_count: int = 0
    clipped_count: int = 0
    scaled_count: int = 0
    """Steps in which it clipped gradients that still had the GradScaler's factor."""
    max_norm: float = 0.0
    totals: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


@dataclass(eq=False)
class StepHistory:
    """One optimizer."""

    name: str
    line: Line | None
    backward_line: Line | None = None
    has_closure: bool = False
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_RECENT))
    clipping: Clipping = field(default_factory=Clipping)
    steps_count: int = 0
    first_losses: list[float] = field(default_factory=list)
    """Of the first three steps."""
    most_loss: float = -math.inf
    largest_norm: float = 0.0
    """Of all steps but the last."""
    most_rate: float = 0.0
    idle_since: int | None = None
    """The step from which on the learning rate was 0, up to the last."""
    classes: int | None = None
    """How many classes the loss chooses from."""
    micro_batches: int = 1
    """Backward passes in the last step."""
    members: frozenset[int] = frozenset()
    """The positions of the parameters that had a gradient in the last step."""
    since: int = 0
    """Steps since other parameters got a gradient."""

    def add(self, moment: Moment) -> None:
        """One more step."""
        if self.moments:
            last = self.moments[-1]
            if math.isfinite(last.norm):
                self.largest_norm = max(self.largest_norm, last.norm)
            if math.isfinite(last.loss):
                self.most_loss = max(self.most_loss, last.loss)
        self.moments.append(moment)
        self.steps_count += 1
        self.since += 1
        self.most_rate = max(self.most_rate, moment.rate)
        self.idle_since = None if moment.rate != 0 else moment.step if self.idle_since is None else self.idle_since
        if len(self.first_losses) < 3 and math.isfinite(moment.loss):  # noqa: PLR2004 - see there
            self.first_losses.append(moment.loss)

    @property
    def is_warming_up(self) -> bool:
        """Whether the learning rate rises over the last steps."""
        return self.moments[-1].rate > 1.001 * self.moments[0].rate

    @property
    def is_winding_down(self) -> bool:
        """Whether a schedule has all but ended the training."""
        return self.moments[-1].rate < 0.05 * self.most_rate

    def losses(self) -> list[float]:
        """The finite ones of the last steps."""
        return [one.loss for one in self.moments if math.isfinite(one.loss)]
