"""``%memtrace --compare a b``: two traces side by side: which peaks lower, by how much, and of what there is less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import byte_size, share
from torchdebug_magics.instruments.memtrace.report import MemtraceReport
from torchdebug_magics.instruments.memtrace.verdict import many
from torchdebug_magics.report import Report

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import Growth

__all__ = ["Comparison", "compared", "growth"]

_ALIKE = 0.01
"""Of the larger peak: a difference below this is none."""


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


def compared(*values: object, names: Sequence[str] = (), compare: bool = False, **_of_a_session: object) -> Comparison:
    """`names` are those of the values, where they are known."""
    if not compare:
        msg = "memtrace takes values only with --compare: write `%memtrace --compare a b`"
        raise TorchDebugError(msg)
    reports = [value for value in values if isinstance(value, MemtraceReport)]
    if len(reports) != len(values) or len(reports) != 2:  # noqa: PLR2004 - two are compared
        given = ", ".join(type(value).__name__ for value in values) or "nothing"
        msg = f"--compare takes two reports of %%memtrace, kept with `-o a` and `-o b`, not {given}"
        raise TorchDebugError(msg)
    first, second = names if len(names) == len(reports) and names[0] != names[1] else ("a", "b")
    return Comparison(names=(first, second), reports=(reports[0], reports[1]))
