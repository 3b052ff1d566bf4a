"""What a trace of memory may find wrong: growth, cycles, what a `del` did not free, memory that was refused. Plain data; sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["Advice", "Cycle", "GraphGrowth", "Growth", "Oom", "Phase", "Undeleted"]

Phase: TypeAlias = Literal["forward", "loss", "backward", "optimizer", "other"]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What every iteration adds."""

    bytes_per_iteration: int
    iterations_count: int
    location: Location | None
    """The line that allocates what is kept."""
    holder: str
    """The variable's path, such as ``losses[0].grad_fn -> PowBackward0.saved_self``; empty where none was found."""
    fix: str
    keeps_graph: bool = False
    """Whether it is the graph of the backward pass that is kept, and not only data."""
    others: tuple[str, ...] = ()
    """Further variables that grow, with what they keep not counted here."""
    kept_at: Location | None = None
    """The line that puts it there, where it was found."""
    frees_bytes: int = 0
    """What following `fix` would have freed at the end: what nothing else holds. 0 where that is not known, as of a call that is over."""
    what: Literal["tensors", "objects", "workers", "profiler"] = "tensors"
    """What it is that grows: Python objects, pages that DataLoader workers had to copy, a profiler's events."""
    share_ratio: float = 1.0
    """Of all that the process grew by in the loop; of tensors, 1."""


@dataclass(frozen=True, kw_only=True)
class GraphGrowth:
    """Autograd nodes that every iteration adds: no tensor, but some hundred bytes each, and time."""

    nodes_per_iteration: int
    iterations_count: int
    holder: str
    fix: str
    location: Location | None = None
    """The line that puts it there."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Objects that refer to each other: their memory is freed only when Python's collector runs."""

    path: str
    freed_bytes: int
    """In tensors that were made in the cell, when all of it was collected at the end."""
    count: int = 1
    """How often it was made, at least."""
    location: Location | None = None
    """The line that closes the circle."""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Undeleted:
    """What is still there though it is done with: a variable was deleted, or the call that it was made for has failed."""

    name: str
    """Of the deleted variable; empty where an error that is being handled holds what the failed call had made."""
    location: Location
    """Of the ``del``, or of the call that is made while the error is handled."""
    live_bytes: int
    holder: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something that would help, and by how much on this model."""

    what: str
    saved_bytes: int
    how: str = ""
    changes_training: bool = False
    """Whether the model would not be trained to the same numbers."""


@dataclass(frozen=True, kw_only=True)
class Oom:
    """Memory was refused."""

    asked_bytes: int
    op: str
    module: str
    location: Location | None
    phase: Phase
    iteration: int
    """1-based, of the loop; 0 outside any."""
    kind: Literal["sizing", "leak", "fragmentation", "handled error"]
    live_bytes: int
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    unused_reserved_bytes: int = 0
    """Of the caching allocator: taken from the device, and in no tensor."""
    advice: tuple[Advice, ...] = ()
    """What changes the result least first; `best` is the one to begin with."""

    @property
    def best(self) -> Advice | None:
        """What grows, is fragmented or is held by an error is the cause; else what saves most and trains as before."""
        if self.kind != "sizing":
            return self.advice[-1] if self.advice else None
        return max(self.advice, key=lambda one: one.saved_bytes * (not one.changes_training), default=None)
