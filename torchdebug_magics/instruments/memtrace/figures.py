"""The figures of a trace as named rows."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, count, plural, share
from torchdebug_magics.instruments.memtrace.findings import Growth
from torchdebug_magics.instruments.memtrace.report import DeviceMemory, MemtraceReport
from torchdebug_magics.instruments.memtrace.verdict import many
from torchdebug_magics.report import Report

_WORTH_TRIMMING = 16 << 20
_ALIKE = 0.01
"""Of the larger peak: a difference below this is none."""


def figures(report: MemtraceReport) -> tuple[tuple[str, str], ...]:
    """Names and values of all figures that are known."""
    rows = [
        ("torch memory", f"{byte_size(report.start_bytes)} before the cell, {change(report.net_bytes)} after it"),
        ("held from before, freed", byte_size(report.freed_before_bytes) if report.freed_before_bytes else ""),
        *[(one.device, _device(one)) for one in report.devices if len(report.devices) > 1 or one.reserved_bytes is not None],
        ("this process", _process(report)),
        ("kept by the C library", _kept_by_heap(report)),
        (
            "borrowed",
            f"{byte_size(report.borrowed_bytes)} that other libraries own, such as NumPy (`from_numpy`)" if report.borrowed_bytes else "",
        ),
        ("memory-mapped", f"{byte_size(report.mapped_bytes)} of files" if report.mapped_bytes else ""),
        ("not traced", f"{byte_size(report.untraced_bytes)}" if report.untraced_bytes else ""),
        *[("reference cycles", f"{byte_size(cycle.freed_bytes)}: `{cycle.path}`") for cycle in report.cycles],
        ("traced", _followed(report)),
        ("snapshot", f"`{report.snapshot}`; open it at pytorch.org/memory_viz" if report.snapshot else ""),
    ]
    return tuple((name, text) for name, text in rows if text)


def remaining(report: MemtraceReport) -> list[tuple[str, str]]:
    """What the process kept, what the cell left, and which variable holds most of it."""
    if report.is_light and not report.net_bytes and not report.process_grown_bytes:
        return []
    now = report.start_bytes + report.net_bytes
    held = f"; most of it in `{report.holders[0].variable}`" if report.holders and report.net_bytes > 0 else ""
    loop = ""
    if report.unseen_loop is not None:
        loop = f"; growth was not checked in the loop at {report.unseen_loop}: no training step was recognized there"
    grown = f"{change(report.process_grown_bytes)} of this process, outside of tensors: the variable that keeps it was not found"
    return [
        ("but", grown if report.process_grown_bytes else ""),
        (
            "after the cell",
            f"{change(report.net_bytes)}: torch held {byte_size(report.start_bytes)} before, {byte_size(now)} after{held}{loop}",
        ),
    ]


def change(size_bytes: int) -> str:
    """``+1.5 MiB``."""
    return f"{'+' if size_bytes >= 0 else '-'}{byte_size(abs(size_bytes))}"


def _process(report: MemtraceReport) -> str:
    if report.rss_peak_bytes is None:
        return ""
    said = f"peak {byte_size(report.rss_peak_bytes)}"
    if report.rss_net_bytes is not None:
        said += f", {change(report.rss_net_bytes)} at the end"
    if report.limit_bytes is not None:
        said += f"; the limit is {byte_size(report.limit_bytes)} ({report.limit})"
    return said


def _kept_by_heap(report: MemtraceReport) -> str:
    if report.heap_kept_bytes < _WORTH_TRIMMING:
        return ""
    return f"{byte_size(report.heap_kept_bytes)} of freed memory; `%memclean --free heap` returns it to the system"


def _followed(report: MemtraceReport) -> str:
    """How many steps were traced op by op, and what was done with the others."""
    seen = f"{count(report.ops_count)} operation{'' if report.ops_count == 1 else 's'}"
    if not report.steps_count:
        return seen
    some = "all" if report.followed_count == report.steps_count else f"{report.followed_count:,}"
    rest = (
        "; only the memory of the others was counted, and the picture shows them in sequence"
        if 0 < report.followed_count < report.steps_count
        else ""
    )
    return f"{seen}; {some} of {plural(report.steps_count, 'step')} op by op{rest}"


def _device(one: DeviceMemory) -> str:
    said = f"peak {byte_size(one.peak_bytes)}, {change(one.net_bytes)} at the end"
    if one.allocated_bytes is None or one.reserved_bytes is None:
        return said
    return f"{said}; its allocator: {_counted('MA', one.allocated_bytes, one.allocated_peak_bytes)}, " + _counted(
        "CA", one.reserved_bytes, one.reserved_peak_bytes
    )


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
        return tuple(sorted({*sizes[0], *sizes[1]}, key=lambda name: -max(one.get(name, 0) for one in sizes)))

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
        growing = [growth(report) for report in self.reports]
        if (growing[0] is None) == (growing[1] is None):
            return ""
        at = 0 if growing[0] is not None else 1
        found = growing[at]
        size = "" if found is None else f" by {byte_size(found.bytes_per_iteration)} each time"
        return f"{self.names[at]} grows{size}, {self.names[1 - at]} does not"


def growth(report: MemtraceReport) -> Growth | None:
    """The growth over iterations, or else over runs of the cell."""
    return report.growth if report.growth is not None else report.rerun_growth
