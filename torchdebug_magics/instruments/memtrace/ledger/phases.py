"""What the cell is doing: forward, loss, backward, optimizer, or something else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from torchdebug_magics.instruments.memtrace.findings import Phase
from torchdebug_magics.probing.source.lines import Line, Lines

_MOST_SPANS = 1 << 13
"""Remembered for the picture."""
PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameter", "gradient", "optimizer state"
ACTIVATION, BUFFER, TEMPORARY, OTHER = "activation", "buffer", "temporary", "other"


@dataclass(eq=False)
class Span:
    """One stretch of one phase."""

    phase: Phase
    first: int = 0
    """Events of the ledger before it."""
    keeps_graph: bool = False
    """Whether gradients were enabled when it began."""
    is_between: bool = False
    """Whether it is none that a call, a backward pass or an update opened, whatever its name is: ops are then seen in every step."""
    model: int = 0
    """The id of the model whose call it is; 0 for none. Two models may have parts of the same path, and be called from one line."""


@dataclass
class Phases:
    """The spans so far. What precedes a backward pass is the loss, or without a model the forward: that is known when it begins."""

    spans: list[Span] = field(default_factory=lambda: [Span("other", is_between=True)])
    trains: bool = False
    """Whether there was a backward pass."""
    _forward_seen: bool = False
    """Whether a model was called since the last backward pass or update."""

    @property
    def now(self) -> Span:
        """The one that runs."""
        return self.spans[-1]

    def enter(self, phase: Phase, *, at: int, keeps_graph: bool) -> Span:
        """A phase begins; the one before it is over."""
        if phase == "backward" and self.now.phase == "other" and self.now.keeps_graph:
            self.now.phase = "loss" if self._forward_seen else "forward"
        self.trains |= phase == "backward"
        if phase in {"backward", "optimizer"}:
            self._forward_seen = False
        elif phase == "forward":
            self._forward_seen = True
        span = Span(phase, at, keeps_graph, is_between=phase == "other")
        if self.now.first == at:
            self.spans.pop()  # nothing happened in it
        self.spans.append(span)
        if len(self.spans) > _MOST_SPANS:
            del self.spans[: _MOST_SPANS // 2]
        return span


class Place(Line):
    """A line that allocates."""

    def __init__(self, file: str, line: int, function: str) -> None:
        super().__init__(file, line, function)
        self.steps: dict[Hashable, set[int]] = defaultdict(set)
        """By who asked, as `Block.source` has it: the steps in which it was seen to allocate."""
        self.count = 0
        """Allocations."""


Places = Lines[Place]
