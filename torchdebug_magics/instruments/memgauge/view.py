"""What a gauge shows: the peak and what was left, then every memory as it stood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size
from torchdebug_magics.html.page import Meters, Note, Page
from torchdebug_magics.report import Gauge

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Status
    from torchdebug_magics.instruments.memgauge.report import DevicePeak, GaugeReport, LiveGauges

__all__ = ["after_cell", "live_page", "page"]

_NARROW = 0.1
"""What is left of the limit, as a share, below which a peak is no longer fine."""


def page(report: GaugeReport) -> Page:
    """The frozen gauges."""
    blocks: tuple[Block, ...] = (
        Meters("At the peak", tuple(_peaks(report))),
        Meters("At the end", report.gauges),
        *(Note(problem, "warn") for problem in report.problems),
    )
    return Page("memgauge", _status(report), report.verdict, blocks)


def live_page(snapshot: LiveGauges) -> Page:
    """The gauges as they move."""
    return Page("memgauge", "busy", f"Peak so far {byte_size(snapshot.rss_peak_bytes)}", (Meters("", snapshot.gauges),))


def after_cell(before: LiveGauges | None, now: LiveGauges) -> Page | None:
    """In the cell that was interrupted, the guard says that it was the one who did it."""
    new = now.interrupts[len(before.interrupts) if before is not None else 0 :]
    return Page("memgauge", "warn", str(new[-1])) if new else None


def _status(report: GaugeReport) -> Status:
    if report.interrupts:
        return "warn"
    left = report.left_bytes
    return "warn" if left is not None and report.limit_bytes and left < _NARROW * report.limit_bytes else "good"


def _peaks(report: GaugeReport) -> list[Gauge]:
    grown = report.rss_end_bytes - report.rss_start_bytes
    change = f"{byte_size(abs(grown))} {'more' if grown >= 0 else 'less'} at the end than at the start"
    how = "counted by the system" if report.rss_peak_is_exact else "as high as it was seen: this system has no counter for it"
    return [
        Gauge("this process (RSS)", report.rss_peak_bytes, report.limit_bytes, note=f"{how}; {change}"),
        *(_device(one) for one in report.devices if one.peak_bytes),
    ]


def _device(one: DevicePeak) -> Gauge:
    how = "counted by torch" if one.is_exact else "as high as it was seen: torch's counter stood higher before, and is not reset"
    return Gauge(f"{one.label}, allocated", one.peak_bytes, one.total_bytes, note=how)
