"""The report of a memory trace, and two of them compared."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, share
from torchdebug_magics.instruments.memtrace import words
from torchdebug_magics.instruments.memtrace.trace import Trace
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Finding, Location, Report, Stage, Status

_MOST_SITES = 20
_MUCH_BYTES = 16 << 20
_ALIKE = 0.01
"""Of the larger peak: a difference below this is none."""


@dataclass(frozen=True, kw_only=True)
class MemtraceReport(Trace):
    """The memory that a cell used: peak, holders, growth."""

    @property
    def verdict(self) -> str:
        """What happened and what to change, or the peak and what remains."""
        return words.verdict(self)

    @property
    def title(self) -> str:
        """What happened and where; the fix and the holder have rows of their own."""
        return words.headline(self)

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

    def main_finding(self) -> Finding | None:
        """The first thing to change."""
        return words.leading(self)


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
        return f"{words.many(name)} {byte_size(less.get(name, 0))} instead of {byte_size(more.get(name, 0))}"

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
