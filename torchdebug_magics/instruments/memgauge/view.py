"""What a gauge shows: growth and what was left, the memory of the process over time; every gauge folds."""

from __future__ import annotations

from torchdebug_magics.format import byte_size, duration
from torchdebug_magics.html.page import Block, Chart, Facts, Fold, Meters, Note, Page, Status
from torchdebug_magics.instruments.memgauge.report import GaugeReport, LiveGauges
from torchdebug_magics.report import Gauge

_NARROW = 0.1
"""The share of the limit below which what is left is too little to be fine."""
_LARGE_BYTES = 64 << 20
"""Growth that is worth a look, however large the machine is."""
_MIB = 2**20
_COUNTED = "counted by torch"
_SAMPLED = "the largest sample: torch's counter was higher before the cell, and is not reset"
_FEWEST = 3
"""Points that make a line."""


def page(report: GaugeReport) -> Page:
    """The frozen gauges."""
    blocks: tuple[Block, ...] = (
        *([Facts(rows)] if (rows := report.rows()) else []),
        *_course(report),
        *(Note(problem, "warn") for problem in report.problems),
        Fold(
            "Every gauge, at the peak and at the end", (Meters("At the peak", tuple(_peaks(report))), Meters("At the end", report.gauges))
        ),
    )
    return Page("memgauge", _status(report), report.title, blocks)


def _course(report: GaugeReport) -> list[Block]:
    if len(report.course_bytes) < _FEWEST:
        return []
    values = tuple(size / _MIB for size in report.course_bytes)
    ends = ("0 s", duration(report.duration_s))
    return [Chart("Memory of this process (RSS), in MiB", values, "time", "MiB", log=False, ends=ends)]


def live_page(snapshot: LiveGauges) -> Page:
    """The gauges as they move."""
    return Page("memgauge", "busy", f"Peak so far {byte_size(snapshot.rss_peak_bytes)}", (Meters("", snapshot.gauges),))


def page_after_cell(before: LiveGauges | None, now: LiveGauges) -> Page | None:
    """What the cell that the guard interrupted shows; None where the guard did nothing new."""
    new = now.interrupts[len(before.interrupts) if before is not None else 0 :]
    return Page("memgauge", "warn", str(new[-1])) if new else None


def _status(report: GaugeReport) -> Status:
    if report.interrupts:
        return "warn"
    left = report.left_bytes
    if left is not None and report.limit_bytes and left < _NARROW * report.limit_bytes:
        return "warn"
    return "info" if report.grown_bytes >= _LARGE_BYTES else "good"


def _peaks(report: GaugeReport) -> list[Gauge]:
    how = "counted by the system" if report.rss_peak_is_exact else "the largest sample: this system has no counter for it"
    return [
        Gauge("this process (RSS)", report.rss_peak_bytes, report.limit_bytes, note=how),
        *(
            Gauge(f"{device.label}, allocated", device.peak_bytes, device.total_bytes, note=_COUNTED if device.is_exact else _SAMPLED)
            for device in report.devices
            if device.peak_bytes
        ),
    ]
