"""What happened in which order: backward passes, updates, and gradients set to zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.probing.lines import Line

__all__ = ["Backward", "Course", "Update"]

_MOST_BACKWARDS = 64


@dataclass(slots=True)
class Backward:
    """One call of backward() or grad()."""

    index: int
    line: Line | None
    nodes: frozenset[int] = frozenset()
    """Sequence numbers of the graph's nodes."""
    failed: bool = False


@dataclass(slots=True)
class Update:
    """One call of an optimizer's step() or zero_grad()."""

    what: str
    """``"step"`` or ``"zero_grad"``."""
    line: Line | None
    optimizer: int


@dataclass
class Course:
    """The latest events; the counts are of all."""

    backwards: list[Backward] = field(default_factory=list)
    events: list[Backward | Update] = field(default_factory=list)
    backward_count: int = 0
    steps_count: int = 0

    def add(self, event: Backward | Update) -> None:
        """One more."""
        if isinstance(event, Backward):
            self.backward_count += 1
            self.backwards = [*self.backwards[-_MOST_BACKWARDS:], event]
        elif event.what == "step":
            self.steps_count += 1
        self.events = [*self.events[-4 * _MOST_BACKWARDS :], event]
