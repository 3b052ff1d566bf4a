"""Two traces side by side: which peaks lower, by how much, and of what there is less. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, share
from torchdebug_magics.instruments.memtrace.verdict import many
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.report import Growth, MemtraceReport

__all__ = ["Comparison", "growth"]

_ALIKE = 0.01
"""Of the larger peak: a difference below this is none."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """Of two reports."""

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
        """Who peaks lower; and who grows, where only one does."""
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
    """Of the iterations, or of the runs."""
    return report.growth if report.growth is not None else report.rerun_growth
