"""Takes from one rank's memgauge report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memgauge.report import GaugeReport

__all__ = ["compared"]


def compared(report: GaugeReport) -> Compared:
    """Its peaks, on every device and of the process."""
    peaks = (("this process", report.rss_peak_bytes), *((one.label, one.peak_bytes) for one in report.devices))
    return Compared(
        found_at=(0, 0) if report.interrupts else None,
        size_bytes=sum(size for _, size in peaks),
        sites=tuple((what, size, None) for what, size in peaks),
    )
