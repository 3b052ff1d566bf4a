"""What a trace can find: growth, reference cycles, a `del` that frees nothing, memory that was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchdebug_magics.report import Finding, Location, Stage

Phase: TypeAlias = Literal["forward", "loss", "backward", "optimizer", "other"]


@dataclass(frozen=True, kw_only=True)
class Growth(Finding):
    """Memory that every iteration adds."""

    bytes_per_iteration: int
    iterations_count: int
    holder: str
    """The variable's path, such as ``losses[0].grad_fn -> PowBackward0.saved_self``; empty where none was found."""
    variable: str = ""
    """The variable or collection at its start, as one writes it: ``losses``."""
    keeps_graph: bool = False
    """Whether it is the graph of the backward pass that is kept, and not only data."""
    others: tuple[str, ...] = ()
    """Other variables that grow; their memory is not included."""
    kept_at: Location | None = None
    """The line that stores it in the holder; None where it was not found."""
    frees_bytes: int = 0
    """Bytes that `fix` would have freed at the end, as nothing else holds them; 0 where that is unknown."""
    what: Literal["tensors", "objects", "workers", "profiler"] = "tensors"
    """What grows: tensors, Python objects, pages that DataLoader workers copied, or a profiler's events."""
    share_ratio: float = 1.0
    """The share of the growth of the process in the loop; 1 for tensors."""

    @property
    def fix_at(self) -> Location | None:
        """Where it is kept, if that is known; else where it is allocated."""
        return self.kept_at or self.location


@dataclass(frozen=True, kw_only=True)
class GraphGrowth(Finding):
    """Autograd nodes that every iteration adds: a few hundred bytes each, and time in the backward pass."""

    nodes_per_iteration: int
    iterations_count: int
    holder: str
    variable: str = ""
    """The variable or collection at the start of `holder`, as one writes it."""


@dataclass(frozen=True, kw_only=True)
class Cycle(Finding):
    """Objects that refer to each other: their memory is freed only when Python's collector runs."""

    path: str
    freed_bytes: int
    """Bytes of this cell's tensors that a collection at the end freed."""
    count: int = 1
    """How often the cycle was created, at least."""


@dataclass(frozen=True, kw_only=True)
class Undeleted(Finding):
    """Memory that outlives its use: its variable was deleted, or the call that allocated it has failed."""

    name: str
    """The deleted variable; empty where an error that is being handled holds the tensors of the failed call."""
    location: Location
    """The line of the ``del``, or of the call made while the error is handled."""
    live_bytes: int
    holder: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A remedy, and how much memory it would save on this model."""

    what: str
    saved_bytes: int
    how: str = ""
    changes_training: bool = False
    """Whether training would give different numbers."""


@dataclass(frozen=True, kw_only=True)
class Oom(Finding):
    """An allocation that was refused."""

    asked_bytes: int
    op: str
    module: str
    phase: Phase
    iteration: int
    """1-based iteration of the loop; 0 outside a loop."""
    kind: Literal["sizing", "leak", "fragmentation", "handled error"]
    live_bytes: int
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    unused_reserved_bytes: int = 0
    """Bytes that the caching allocator has reserved on the device and that no tensor uses."""
    advice: tuple[Advice, ...] = ()
    """Remedies, those that change training least first; `best` is the one to begin with."""

    @property
    def stage(self) -> Stage:
        """It ended the cell, unless its error was handled."""
        return "end"

    @property
    def best(self) -> Advice | None:
        """The remedy for the cause; without a cause, the one that saves most and does not change training."""
        if self.kind != "sizing":
            return self.advice[-1] if self.advice else None
        return max(self.advice, key=lambda one: one.saved_bytes * (not one.changes_training), default=None)


Leading: TypeAlias = Growth | GraphGrowth | Cycle | Undeleted | Oom
