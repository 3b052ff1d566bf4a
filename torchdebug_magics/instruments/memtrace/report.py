"""The report of a memory trace, with its words, each thing once; and two reports compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchdebug_magics.format import byte_size, capitalised, count, listed, plural, share, signed
from torchdebug_magics.instruments.memtrace.trace import (
    Cycle,
    DeviceMemory,
    GraphGrowth,
    Growth,
    Holder,
    Leading,
    Oom,
    Peak,
    Phase,
    Rows,
    Site,
    Timeline,
    TraceMark,
    Undeleted,
)
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Location, Report, Stage, Status, short_title

_MOST_SITES = 20
_MUCH_BYTES = 16 << 20
_ALIKE = 0.01
"""Of the larger peak: a difference below this is none."""
_NODE_BYTES = 500
"""About what an autograd node takes."""
_WHEN: Mapping[Phase, str] = {
    "forward": " in the forward pass",
    "loss": " in the loss",
    "backward": " in the backward pass",
    "optimizer": " in the optimizer's step",
    "other": "",
}
"""Where in a training step, as the end of a phrase."""
_MANY: Mapping[str, str] = {
    "parameter": "parameters", "gradient": "gradients", "activation": "activations", "buffer": "buffers", "temporary": "temporaries",
    "other": "other tensors",
}  # fmt: skip
_TOLD = frozenset({"guard", "held by", "fix", "kept by", "cycle", "also growing", "but", "after the cell"})
"""Rows that the verdict has, too: what to change, and what remains."""
_WORTH_TRIMMING = 16 << 20
_LONGEST = 90
_BETWEEN = " · "


@dataclass(frozen=True, kw_only=True)
class MemtraceReport(Report):
    """The memory that a cell used: peak, holders, growth."""

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
    timeline: Timeline = field(default_factory=Timeline)
    ops_count: int = 0
    steps_count: int = 0
    followed_count: int = 0
    """Steps traced op by op; only the memory of the others was counted."""
    excerpt: tuple[tuple[int, str], ...] = ()
    """The line to look at with its neighbors: numbers and text."""
    is_light: bool = False
    """Whether ops were not traced: then there are no sites, and the peak is that of the process."""

    @property
    def verdict(self) -> str:
        """The headline, and the rows that tell what to change; where nothing was found, what remains."""
        told = (f"{name}: {text}" for name, text in self.rows() if name in _TOLD)
        return _BETWEEN.join([self.title, *told])

    @property
    def title(self) -> str:
        """The finding that matters most and its line, or the peak and what became of it."""
        found = self.main_finding()
        if found is None:
            return f"Stopped by guard at {self.interrupts[-1].reached}" if self.interrupts else self._peak()
        short, times = found.happened(self._each(found))
        guarded = "stopped by guard: " if self.interrupts else ""
        return short_title(capitalised(f"{guarded}{short}{times}"), found.fix_at, shorter=capitalised(short))

    @property
    def status(self) -> Status:
        """``good`` only if several steps were seen, and neither a variable nor the process grew."""
        if self.oom is not None or any(growth is not None and growth.keeps_graph for growth in (self.growth, self.rerun_growth)):
            return "bad"
        if self.interrupts or self.main_finding() is not None:
            return "warn"
        return "good" if self.steps_count > 1 and not (self.unnamed_bytes or self.process_grown_bytes) else "info"

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was left or grew, and is much, where no variable is known to hold it."""
        unknown = (
            (self.unnamed_bytes, _MUCH_BYTES, "are left that no variable leads to"),
            (self.process_grown_bytes, 4 * _MUCH_BYTES, "more are in the process, outside of its tensors"),  # an import takes some, too
        )
        if self.main_finding() is not None:
            return ()
        return tuple(f"{byte_size(size)} {what}" for size, least, what in unknown if size >= least)

    def main_stage(self) -> Stage | None:
        """The end, where the guard has interrupted the cell."""
        return "end" if self.interrupts else super().main_stage()

    def main_finding(self) -> Leading | None:
        """The finding that matters most: the first thing to change."""
        if self.oom is not None:
            return self.oom
        cycle, growth, graph = self.kept_by_cycles, self.growth, self.graph_growth
        kept_bytes = 0 if growth is None else growth.bytes_per_iteration * growth.iterations_count
        if cycle is not None and cycle.freed_bytes >= kept_bytes:
            return cycle
        for one in (growth, self.rerun_growth):
            # The nodes of a graph that somebody else keeps may take more.
            if one is not None and (graph is None or one.keeps_graph or one.bytes_per_iteration >= _NODE_BYTES * graph.nodes_per_iteration):
                return one
        return graph if graph is not None else self.undeleted

    def rows(self) -> Rows:
        """What to change, who keeps the memory, and what the guard did; where nothing was found, what remains."""
        found = self.main_finding()
        known = [*self._guarded(found), *(self._remaining() if found is None else found.rows(self._each(found)))]
        return [(name, text) for name, text in known if text]

    def also_found(self) -> list[Rows]:
        """The rows of each further finding, with its line."""
        lead, growth = self.main_finding(), self.growth
        graph = None if growth is not None and growth.keeps_graph else self.graph_growth
        return [
            [("line", "" if one.fix_at is None else f"{one.fix_at}: `{one.fix_at.source}`"), *one.rows(self._each(one))]
            for one in (growth, self.rerun_growth, graph, self.kept_by_cycles, self.undeleted)
            if one is not None and one is not lead
        ]

    def figures(self) -> tuple[tuple[str, str], ...]:
        """Names and values of all figures that are known."""
        kept_bytes = self.heap_kept_bytes if self.heap_kept_bytes >= _WORTH_TRIMMING else 0
        sizes = (self.freed_before_bytes, self.borrowed_bytes, self.mapped_bytes, self.untraced_bytes, kept_bytes)
        freed, borrowed, mapped, untraced, kept = (byte_size(size) if size else "" for size in sizes)
        known = [
            ("torch memory", f"{byte_size(self.start_bytes)} before the cell, {signed(self.net_bytes)} after it"),
            ("held from before, freed", freed),
            *[(device.device, _device(device)) for device in self.devices if len(self.devices) > 1 or device.reserved_bytes is not None],
            ("this process", self._process()),
            ("kept by the C library", kept and f"{kept} of freed memory; `%memclean --free heap` returns it to the system"),
            ("borrowed", borrowed and f"{borrowed} that other libraries own, such as NumPy (`from_numpy`)"),
            ("memory-mapped", mapped and f"{mapped} of files"),
            ("not traced", untraced),
            *[("reference cycles", f"{byte_size(cycle.freed_bytes)}: `{cycle.path}`") for cycle in self.cycles],
            ("traced", self._followed()),
            ("snapshot", self.snapshot and f"`{self.snapshot}`; open it at pytorch.org/memory_viz"),
        ]
        return tuple((name, text) for name, text in known if text)

    def _each(self, found: Leading) -> str:
        return "run" if found is self.rerun_growth else "iteration"

    def _peak(self) -> str:
        what = self._outcome()
        if self.is_light:
            peak = "Peak not known" if self.rss_peak_bytes is None else f"Process peak {byte_size(self.rss_peak_bytes)}"
            return f"{peak}; {what}"
        is_old = self.peak_bytes <= self.start_bytes
        peak = f"Peak {byte_size(self.peak_bytes)}{' at the start of the cell' if is_old else _WHEN[self.peak.phase]}"
        where = None if is_old else self.peak.location
        place = "" if where is None else _BETWEEN + where.place
        return f"{peak}{place if len(f'{peak}{place}; {what}') <= _LONGEST else ''}; {what}"

    def _outcome(self) -> str:
        if self.unnamed_bytes:
            return f"{byte_size(self.unnamed_bytes)} left that no variable leads to"
        if self.unseen_loop is not None:
            return "growth not checked: no steps"
        if self.process_grown_bytes:
            return f"the process grew by {byte_size(self.process_grown_bytes)}"
        if self.steps_count > 1 or self.collects:
            return f"only `{self.collects}` grows" if self.collects else f"no growth over {count(self.steps_count)} steps"
        if self.net_bytes == 0:
            return "all memory was released"
        return f"{byte_size(abs(self.net_bytes))} {'still held' if self.net_bytes > 0 else 'less than before'}"

    def _guarded(self, found: Leading | None) -> Rows:
        """What the guard did, and who holds the memory that it stopped at."""
        if not self.interrupts:
            return []
        last = self.interrupts[-1]
        where = "" if found is None else f" at {last.reached}"
        holders = "" if found is not None else listed([f"`{holder.variable}` {byte_size(holder.live_bytes)}" for holder in self.holders])
        return [("guard", last.action(where)), ("held by", holders)]

    def _remaining(self) -> Rows:
        """What the process kept, what the cell left, and which variable holds most of it."""
        if self.is_light and not self.net_bytes and not self.process_grown_bytes:
            return []
        before, after = self.start_bytes, self.start_bytes + self.net_bytes
        held = f"; most of it in `{self.holders[0].variable}`" if self.holders and self.net_bytes > 0 else ""
        loop = ""
        if self.unseen_loop is not None:
            loop = f"; growth was not checked in the loop at {self.unseen_loop}: no training step was recognized there"
        grown = f"{signed(self.process_grown_bytes)} of this process, outside of tensors: the variable that keeps it was not found"
        return [
            ("but", grown if self.process_grown_bytes else ""),
            ("after the cell", f"{signed(self.net_bytes)}: torch held {byte_size(before)} before, {byte_size(after)} after{held}{loop}"),
        ]

    def _process(self) -> str:
        if self.rss_peak_bytes is None:
            return ""
        net = "" if self.rss_net_bytes is None else f", {signed(self.rss_net_bytes)} at the end"
        limit = "" if self.limit_bytes is None else f"; the limit is {byte_size(self.limit_bytes)} ({self.limit})"
        return f"peak {byte_size(self.rss_peak_bytes)}{net}{limit}"

    def _followed(self) -> str:
        """How many steps were traced op by op, and what was done with the others."""
        ops = f"{count(self.ops_count)} operation{'' if self.ops_count == 1 else 's'}"
        if not self.steps_count:
            return ops
        steps = "all" if self.followed_count == self.steps_count else f"{self.followed_count:,}"
        is_part = 0 < self.followed_count < self.steps_count
        rest = "; only the memory of the others was counted, and the picture shows them in sequence" if is_part else ""
        return f"{ops}; {steps} of {plural(self.steps_count, 'step')} op by op{rest}"


def many(category: str) -> str:
    """The plural name of a category, such as ``activations``."""
    return _MANY.get(category, category)


def _device(one: DeviceMemory) -> str:
    text = f"peak {byte_size(one.peak_bytes)}, {signed(one.net_bytes)} at the end"
    if one.allocated_bytes is None or one.reserved_bytes is None:
        return text
    allocated = _counted("MA", one.allocated_bytes, one.allocated_peak_bytes)
    return f"{text}; its allocator: {allocated}, {_counted('CA', one.reserved_bytes, one.reserved_peak_bytes)}"


def _counted(name: str, now_bytes: int, peak_bytes: int | None) -> str:
    peak = "the peak is from before the cell" if peak_bytes is None else f"peak {byte_size(peak_bytes)}"
    return f"{name} {byte_size(now_bytes)} ({peak})"


@dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """Two traces, compared by their peaks and their growth."""

    names: tuple[str, str]
    reports: tuple[MemtraceReport, MemtraceReport]

    @property
    def is_light(self) -> bool:
        """Whether only the peaks of the process can be compared."""
        return any(report.is_light for report in self.reports)

    @property
    def peaks_bytes(self) -> tuple[int, int]:
        """Of torch, or of the process where that is all that both know."""
        first, second = self.reports
        if self.is_light:
            return first.rss_peak_bytes or 0, second.rss_peak_bytes or 0
        return first.peak_bytes, second.peak_bytes

    @property
    def verdict(self) -> str:
        """Which trace peaks lower, and which one grows if only one does."""
        return "; ".join(part for part in (self._peaks(), self._grows()) if part)

    def categories(self) -> tuple[str, ...]:
        """All that was held at either peak, the most first."""
        sizes = [report.peak.by_category for report in self.reports]
        return tuple(sorted({*sizes[0], *sizes[1]}, key=lambda name: -max(size.get(name, 0) for size in sizes)))

    def _peaks(self) -> str:
        whose = " in the whole process" if self.is_light else ""
        low, high = sorted((0, 1), key=lambda at: self.peaks_bytes[at])
        less, most = self.peaks_bytes[low], self.peaks_bytes[high]
        first, second = self.names
        if most - less <= _ALIKE * most:
            return f"{first} and {second} peak alike{whose}, at {byte_size(most)}"
        said = f"{self.names[low]} peaks {share((most - less) / most)} lower than {self.names[high]}{whose}"
        return f"{said}: {self._reason(low, high)}"

    def _reason(self, low: int, high: int) -> str:
        less, more = (self.reports[at].peak.by_category for at in (low, high))
        saved = {name: more.get(name, 0) - less.get(name, 0) for name in self.categories()}
        name = max(saved, key=lambda one: saved[one], default="")
        if self.is_light or not name or saved[name] <= 0:
            return f"{byte_size(self.peaks_bytes[low])} instead of {byte_size(self.peaks_bytes[high])}"
        return f"{many(name)} {byte_size(less.get(name, 0))} instead of {byte_size(more.get(name, 0))}"

    def _grows(self) -> str:
        growing = [report.growth or report.rerun_growth for report in self.reports]
        if (growing[0] is None) == (growing[1] is None):
            return ""
        at = 0 if growing[0] is not None else 1
        found = growing[at]
        size = "" if found is None else f" by {byte_size(found.bytes_per_iteration)} each time"
        return f"{self.names[at]} grows{size}, {self.names[1 - at]} does not"


def compared(report: MemtraceReport) -> Compared:
    """Its peak, and the lines that take the most: a rank that is out of line has one that the others have not."""
    # Of each site, the bytes that it keeps or, if more, allocates in a step.
    steps_count = max(1, report.steps_count)
    sizes = [(max(site.live_bytes, site.allocated_bytes // steps_count), site) for site in report.sites]
    sizes.sort(key=lambda pair: -pair[0])
    kept: tuple[tuple[str, int, Location | None], ...] = ()
    if (growth := report.growth) is not None:
        kept = ((growth.holder, growth.bytes_per_iteration * growth.iterations_count, growth.fix_at),)
    return Compared(
        worked=bool(report.ops_count or report.interrupts or report.oom),
        found_at=(report.steps_count, 0) if report.oom or report.growth or report.graph_growth or report.interrupts else None,
        size_bytes=report.rss_peak_bytes if report.is_light else report.peak_bytes,
        sites=kept + tuple((site.module or site.category, size, site.location) for size, site in sizes[:_MOST_SITES]),
    )
