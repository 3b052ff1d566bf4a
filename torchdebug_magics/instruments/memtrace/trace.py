"""What was traced of a cell's memory and found in it, as plain data; sizes in bytes. Words for it are in `words`, not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.report import Finding, Gauge, Location, Mark, Report, Stage

Phase: TypeAlias = Literal["forward", "loss", "backward", "optimizer", "other"]
HELD_BEFORE = "held before the cell"
"""The kind, in a timeline, of memory that was allocated before the cell began."""


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


@dataclass(frozen=True)
class Advice:
    """A remedy, and how much memory it would save on this model."""

    what: str
    saved_bytes: int
    how: str = ""
    changes_training: bool = field(default=False, kw_only=True)
    """Whether training would give different numbers."""


@dataclass(frozen=True, kw_only=True)
class Oom(Finding):
    """An allocation that was refused."""

    asked_bytes: int
    op: str
    module: str
    phase: Phase
    iteration: int | None
    """1-based iteration of the loop; 0 outside a loop, and None where the cell was not traced."""
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
PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameter", "gradient", "optimizer state"
ACTIVATION, BUFFER, TEMPORARY, OTHER = "activation", "buffer", "temporary", "other"


@dataclass(frozen=True, kw_only=True)
class Site:
    """The memory that one line allocated, in one module and phase."""

    location: Location | None
    """None for memory whose op was not traced: in compiled code, in another thread, or in a step that was only counted."""
    module: str
    """Module path; for a backward op, that of its forward op."""
    category: str
    """``parameter``, ``gradient``, ``optimizer state``, ``activation``, ``buffer``, ``temporary`` or ``other``."""
    phase: Phase
    allocated_bytes: int
    """Bytes allocated in total."""
    live_bytes: int
    """Bytes of these that were still allocated at the end."""
    count: int
    """Number of allocations."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which live memory was largest."""

    phase: Phase
    op: str
    """The op that allocated last before the peak, such as ``aten.addmm``; empty where it was not traced."""
    location: Location | None
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    """Bytes allocated in the cell, by module path."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """PyTorch's memory on one device."""

    device: str
    net_bytes: int
    peak_bytes: int
    """The peak of traced memory."""
    allocated_bytes: int | None = None
    """Bytes in tensors at the end, counted by the device's allocator; None for a device without one."""
    allocated_peak_bytes: int | None = None
    """The allocator's own peak; None where the counter, which is not reset, was as high before the cell."""
    reserved_bytes: int | None = None
    """Bytes that the allocator had reserved on the device at the end, tensors included."""
    reserved_peak_bytes: int | None = None
    """As `allocated_peak_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A variable that holds memory which the cell allocated."""

    path: str
    """Path to the first tensor."""
    variable: str
    """The variable at the start of the path."""
    live_bytes: int
    location: Location | None
    """The line that allocated most of it."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes by category over the events of the cell."""

    categories: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stretches: tuple[tuple[Phase, int], ...] = ()
    """Each uninterrupted period of a phase, and the point at which it begins."""
    peak: int = 0
    """The point of the peak."""
    marks: tuple[int, ...] = ()
    """The points of the marks, in order."""
    counted: int | None = None
    """The point from which steps were only counted unless their memory changed; None where all were traced."""


@dataclass(frozen=True, kw_only=True)
class TraceMark(Mark):
    """A mark taken while the cell was traced."""

    torch_bytes: int
    """Bytes in tensors on all devices, as traced."""
    phase: Phase


@dataclass(frozen=True)
class LiveMemory:
    """Memory while the cell runs."""

    now_bytes: int
    """Bytes in traced tensors."""
    peak_bytes: int
    phase: Phase
    steps_count: int
    gauges: tuple[Gauge, ...]


@dataclass(frozen=True, kw_only=True)
class Trace(Report):
    """All that is known of the memory that a cell used: peak, holders, growth."""

    net_bytes: int
    """Bytes in tensors at the end minus those at the start."""
    start_bytes: int
    """Bytes in tensors when the cell began."""
    peak_bytes: int
    """The peak of bytes in tensors, those from before the cell included."""
    peak: Peak
    devices: tuple[DeviceMemory, ...] = ()
    sites: tuple[Site, ...] = ()
    """The most live bytes first, then the most allocated."""
    growth: Growth | None = None
    graph_growth: GraphGrowth | None = None
    collects: str = ""
    """The variable in which a loop that does not train collects its results: it grows intentionally."""
    rerun_growth: Growth | None = None
    """Memory that each run of this cell adds; `iterations_count` counts the runs."""
    holders: tuple[Holder, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    kept_by_cycles: Cycle | None = None
    """The cycle that repeatedly kept a large part of the memory; None without one."""
    undeleted: Undeleted | None = None
    unnamed_bytes: int = 0
    """Bytes left by the cell to which no variable leads, so that their growth could not be checked."""
    unseen_loop: Location | None = None
    """A loop with repeated allocations in which no training step was recognized: growth was judged by its lines only."""
    freed_before_bytes: int = 0
    """Bytes from before the cell that it freed."""
    rss_peak_bytes: int | None = None
    rss_net_bytes: int | None = None
    process_grown_bytes: int = 0
    """Steady growth of the process beside its tensors, where no other finding explains it."""
    heap_kept_bytes: int = 0
    """By how much more freed memory the C library keeps, as far as the process grew: not a leak."""
    limit_bytes: int | None = None
    limit: str = ""
    untraced_bytes: int = 0
    """Bytes allocated in the cell by ops that were not traced, and live at the end."""
    borrowed_bytes: int = 0
    """Bytes that tensors borrow from other libraries (``from_numpy``); not included elsewhere."""
    mapped_bytes: int = 0
    """Bytes mapped from files, such as a checkpoint's; included in the other figures."""
    marks: tuple[TraceMark, ...] = ()
    """The marks taken in the cell with ``%memmark``."""
    interrupts: tuple[Interrupt, ...] = ()
    """The guard's interrupts of the cell."""
    snapshot: str = ""
    """The file of the snapshot; empty without one."""
    oom: Oom | None = None
    timeline: Timeline = Timeline()
    ops_count: int = 0
    steps_count: int = 0
    followed_count: int = 0
    """Steps traced op by op; only the memory of the others was counted."""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The line to look at with its neighbors: numbers and text."""
    is_light: bool = False
    """Whether ops were not traced: then there are no sites, and the peak is that of the process."""
