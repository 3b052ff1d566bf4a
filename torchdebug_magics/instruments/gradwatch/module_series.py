"""What is kept of each module over the steps: bins of bounded number, the last steps, and a few facts about all of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.gradwatch.module_owners import Owner
    from torchdebug_magics.instruments.gradwatch.step_history import StepHistory

__all__ = ["BINS", "FAST", "FIRST_STEPS", "Bins", "Grid", "ModuleSeries"]

BINS = 256
FAST, FIRST_STEPS = 0.1, 2
"""An update of more than this share of the weights is too large, but in the first steps."""
_RECENT = 64


class Bins:
    """Values by step, of which each bin keeps one; NaN is kept wherever it occurs."""

    def __init__(self, keep: Callable[[float, float], float]) -> None:
        self._keep = keep
        self.values: list[float | None] = []

    def add(self, place: int, value: float) -> None:
        """Into the bin at `place`, which is never before the last one by more than the present step."""
        values = self.values
        if place == len(values):
            values.append(value)
            return
        values += [None] * (place + 1 - len(values))
        values[place] = self._both(values[place], value)

    def halve(self) -> None:
        """Two bins become one."""
        padded = [*self.values, None] if len(self.values) % 2 else self.values
        self.values = [self._both(a, b) for a, b in zip(padded[::2], padded[1::2], strict=True)]

    def _both(self, first: float | None, second: float | None) -> float | None:
        if first is None or second is None:
            return second if first is None else first
        return self._keep(first, second) if first == first else first  # noqa: PLR0124 - NaN


@dataclass(eq=False)
class ModuleSeries:
    """One module. A step may come in parts, where several optimizers hold its parameters."""

    owner: Owner
    count: int = 0
    """Of its parameters' elements."""
    histories: list[StepHistory] = field(default_factory=list)
    """Of the optimizers that update it."""
    parameters: set[int] = field(default_factory=set)
    """Their ids."""
    is_matrix: bool = False
    """Whether one of those that train has two dimensions or more."""
    is_sharded: bool = False
    """Whether other ranks hold parts of them: of those nothing is known here."""
    is_half: bool = False
    """Whether they are of 16 bits."""
    norms: Bins = field(default_factory=lambda: Bins(max))
    ratios: Bins = field(default_factory=lambda: Bins(max))
    zeros: Bins = field(default_factory=lambda: Bins(min))
    recent_norms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    recent_ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    steps_count: int = 0
    first_step: int = 0
    zero_run: int = 0
    """How many of the last steps had a gradient of zeros only."""
    zero_since: int = 0
    unmoved_run: int = 0
    """How many of the last samples changed no weight although there was a gradient and a learning rate."""
    is_used: bool | None = None
    """Whether the loss depends on it, as its graph says; None where that was not asked."""
    ratio_max: float = 0.0
    norm_max: float = 0.0
    zero_share: float = 0.0
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the steps, but the first few, whose update was as large as the weights."""


@dataclass(eq=False)
class Grid:
    """All modules, and the losses and total norms, in bins of the same width."""

    width: int = 1
    series: dict[tuple[int, str], ModuleSeries] = field(default_factory=dict)
    losses: Bins = field(default_factory=lambda: Bins(lambda _, later: later))
    totals: Bins = field(default_factory=lambda: Bins(max))

    def place(self, step: int) -> int:
        """The bin of a step; the bins are made wider where it would be one too many."""
        while step // self.width >= BINS:
            self.width *= 2
            for bins in (self.losses, self.totals):
                bins.halve()
            for one in self.series.values():
                for bins in (one.norms, one.ratios, one.zeros):
                    bins.halve()
        return step // self.width

    def ordered(self) -> list[ModuleSeries]:
        """In the order of the models; what never had a gradient is left out."""
        return sorted((one for one in self.series.values() if one.steps_count), key=lambda one: (one.owner.model, one.owner.order))
