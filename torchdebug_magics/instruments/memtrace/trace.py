"""What was traced of a cell's memory, as plain data; sizes in bytes. Words for it are in `words`, the report is in `report`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchdebug_magics.instruments.memtrace.findings import Cycle, GraphGrowth, Growth, Oom, Phase, Undeleted
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.report import Gauge, Location, Mark, Report

HELD_BEFORE = "held before the cell"
"""The kind, in a timeline, of memory that was allocated before the cell began."""


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
class Stretch:
    """One uninterrupted period of a phase."""

    phase: Phase
    first: int
    """The point of the timeline at which it begins."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes by category over the events of the cell."""

    categories: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stretches: tuple[Stretch, ...] = ()
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
