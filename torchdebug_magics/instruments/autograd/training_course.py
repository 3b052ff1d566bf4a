"""What happened in which order: backward passes, updates, and gradients set to zero. Plain data: nothing is kept alive by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torchdebug_magics.probing.lines import Line


_MOST_EVENTS = 512


@dataclass(slots=True)
class Backward:
    """One call of backward() or grad()."""

    line: Line | None
    is_recorded: bool = False
    index: int = 0
    """How many ops were recorded before it."""
    ops: frozenset[int] = frozenset()
    """The indices of the ops in its graph."""
    leaves: frozenset[int] = frozenset()
    """The ids of the tensors at which its gradients arrive."""
    left_over: frozenset[int] = frozenset()
    """Of these, the ones that had a gradient other than zero already."""
    loss_is_leaf: bool = False
    loss: int = 0
    """The id of the first tensor that it was called on."""
    failed: bool = False


@dataclass(slots=True)
class Step:
    """One call of an optimizer's step()."""

    line: Line | None
    optimizer: int
    """Its id."""
    is_recorded: bool = False
    name: str = "optimizer"
    parameters: frozenset[int] = frozenset()
    """The ids of its tensors that require a gradient."""
    without: frozenset[int] = frozenset()
    """Of these, the ones without a gradient."""
    nonzero_count: int = 0
    """How many have a gradient that is not all zero."""


@dataclass(slots=True)
class Zeroed:
    """One call of zero_grad(), of an optimizer or a module."""

    line: Line | None
    parameters: frozenset[int] = frozenset()
    is_read: bool = True
    """Whether an op has read one of the gradients before."""


Event: TypeAlias = "Backward | Step | Zeroed"


@dataclass
class Course:
    """The latest recorded events; the counts are of all."""

    events: list[Event] = field(default_factory=list)
    backward_count: int = 0
    recorded_count: int = 0
    steps_count: int = 0
    stepped: set[int] = field(default_factory=set)
    """The ids of all optimizers that made an update."""

    @property
    def backwards(self) -> list[Backward]:
        """The recorded backward passes."""
        return [one for one in self.events if isinstance(one, Backward) and one.is_recorded]

    @property
    def steps(self) -> list[Step]:
        """The recorded updates."""
        return [one for one in self.events if isinstance(one, Step) and one.is_recorded]

    def add(self, event: Event) -> None:
        """One more. Of a row that was not recorded only the first is kept: it pushes nothing out, and keeps apart what is around it."""
        if isinstance(event, Backward):
            self.backward_count += 1
            self.recorded_count += event.is_recorded
        elif isinstance(event, Step):
            self.steps_count += 1
            self.stepped.add(event.optimizer)
        if _was_seen(event) or not self.events or _was_seen(self.events[-1]):
            self.events = [*self.events[-_MOST_EVENTS:], event]


def _was_seen(event: Event) -> bool:
    """Whether more is known of it than its line."""
    return bool(event.parameters) if isinstance(event, Zeroed) else event.is_recorded or (isinstance(event, Backward) and bool(event.ops))
