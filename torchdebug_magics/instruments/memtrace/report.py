"""What a trace of memory found: how much was held at once, by what, and what goes on growing. Plain data; sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchdebug_magics.format import capitalised
from torchdebug_magics.instruments.memtrace.findings import Advice, Cycle, GraphGrowth, Growth, Oom, Phase, Undeleted
from torchdebug_magics.instruments.memtrace.verdict import finding
from torchdebug_magics.report import Gauge, Location, Mark, Report

if TYPE_CHECKING:
    from torchdebug_magics.machine.interrupts import Interrupt

__all__ = [
    "Advice", "Cycle", "DeviceMemory", "GraphGrowth", "Growth", "Holder", "LiveMemory", "MemtraceReport", "Oom", "Peak",
    "Phase", "Site", "Stretch", "Timeline", "TraceMark", "Undeleted",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Site:
    """What one line, in one module and phase, allocated."""

    location: Location | None
    """None for memory that no op was seen to make: inside compiled code, in another thread, or in a step that was only counted."""
    module: str
    """Module path; of a backward op, that of the forward op that it belongs to."""
    category: str
    """``parameter``, ``gradient``, ``optimizer state``, ``activation``, ``buffer``, ``temporary`` or ``other``."""
    phase: Phase
    allocated_bytes: int
    """All that it asked for."""
    live_bytes: int
    """Of that, what was still there at the end."""
    count: int
    """Allocations."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which most was alive."""

    phase: Phase
    op: str
    """The op whose result made it the most, such as ``aten.addmm``; empty where none was seen."""
    location: Location | None
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    """Of what was made in the cell, by module path."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One device's torch memory."""

    device: str
    net_bytes: int
    peak_bytes: int
    """The most that was followed."""
    allocated_bytes: int | None = None
    """In tensors at the end, as the allocator of the device counts; None where it has no allocator of its own."""
    allocated_peak_bytes: int | None = None
    """The allocator's own peak; None where its counter stood as high before the cell: it is not reset."""
    reserved_bytes: int | None = None
    """What the allocator had taken from the device at the end, tensors included."""
    reserved_peak_bytes: int | None = None
    """As `allocated_peak_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A variable that holds what the cell made."""

    path: str
    """To the first of it."""
    variable: str
    """The name that the path begins with."""
    live_bytes: int
    location: Location | None
    """Where the largest part of it was made."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One phase, as long as it ran."""

    phase: Phase
    first: int
    """Point of the timeline at which it began."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes by category over the events of the cell."""

    categories: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stretches: tuple[Stretch, ...] = ()
    peak: int = 0
    """The point of the peak."""
    marks: tuple[int, ...] = ()
    """The points of the marks, in their order."""
    counted: int | None = None
    """The point from which steps were only counted, unless they brought something new; None where all were followed."""


@dataclass(frozen=True, kw_only=True)
class TraceMark(Mark):
    """A mark that was set while the cell was traced."""

    torch_bytes: int
    """In tensors on all devices, as followed here."""
    phase: Phase


@dataclass(frozen=True)
class LiveMemory:
    """While the cell runs."""

    now_bytes: int
    """Of torch tensors, as far as they are followed."""
    peak_bytes: int
    phase: Phase
    steps_count: int
    gauges: tuple[Gauge, ...]


@dataclass(frozen=True, kw_only=True)
class MemtraceReport(Report):
    """What the cell did with memory."""

    net_bytes: int
    """Torch tensors at the end, less those at the start."""
    start_bytes: int
    """Torch tensors alive when it began."""
    peak_bytes: int
    """The most that torch tensors held at once, those from before the cell included."""
    peak: Peak
    devices: tuple[DeviceMemory, ...] = ()
    sites: tuple[Site, ...] = ()
    """The most live bytes first, then the most allocated."""
    growth: Growth | None = None
    graph_growth: GraphGrowth | None = None
    collects: str = ""
    """The variable in which a loop that trains nothing collects its results: it grows, and that is no leak."""
    rerun_growth: Growth | None = None
    """What each run of this same cell adds; `iterations_count` are its runs."""
    holders: tuple[Holder, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    kept_by_cycles: Cycle | None = None
    """Of these the one that kept much of what there was, again and again."""
    undeleted: Undeleted | None = None
    unnamed_bytes: int = 0
    """Of what the cell has left: no variable leads to it, so that it is not known whether it grows."""
    unseen_loop: Location | None = None
    """A loop that allocated again and again, and in which no step was recognized: whether it grows was judged by its lines alone."""
    freed_before_bytes: int = 0
    """Of what was there before the cell, freed in it."""
    rss_peak_bytes: int | None = None
    rss_net_bytes: int | None = None
    heap_kept_bytes: int = 0
    """By how much more the C library keeps of what was freed, as far as the process grew: no leak, and not given back to the system."""
    limit_bytes: int | None = None
    limit: str = ""
    untraced_bytes: int = 0
    """Alive at the end, made in the cell, and by no op that was seen."""
    borrowed_bytes: int = 0
    """Lent to tensors by other libraries (``from_numpy``); in no other figure."""
    mapped_bytes: int = 0
    """Mapped from files; in no other figure."""
    marks: tuple[TraceMark, ...] = ()
    """``%memmark``s that were set in the cell."""
    interrupts: tuple[Interrupt, ...] = ()
    """That the guard stepped in."""
    snapshot: str = ""
    """The file that a snapshot was written to; empty where none was."""
    oom: Oom | None = None
    timeline: Timeline = Timeline()
    ops_count: int = 0
    steps_count: int = 0
    followed_count: int = 0
    """Steps that were followed op by op; the others only counted, as they took what those before them took."""

    is_light: bool = False
    """Whether no op was followed: then there are no sites, and the peak is that of the process."""

    @property
    def verdict(self) -> str:
        """What to change, or how much was held and by what; after an interrupt of the guard's, that it was the guard."""
        return capitalised("; ".join([*map(str, self.interrupts[-1:]), finding(self)]))
