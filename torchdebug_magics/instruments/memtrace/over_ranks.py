"""Takes from one rank's memtrace report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.report import MemtraceReport, Site
    from torchdebug_magics.report import Location

__all__ = ["compared"]

_MOST_SITES = 20


def compared(report: MemtraceReport) -> Compared:
    """Its peak, and the lines that take the most: a rank that is out of line has one that the others have not."""
    sizes = sorted(((_size_bytes(site, report.steps_count), site) for site in report.sites), key=lambda pair: -pair[0])
    kept: tuple[tuple[str, int, Location | None], ...] = ()
    if (growth := report.growth) is not None:
        kept = ((growth.holder, growth.bytes_per_iteration * growth.iterations_count, growth.kept_at or growth.location),)
    return Compared(
        worked=bool(report.ops_count or report.interrupts or report.oom),
        found_at=(report.steps_count, 0) if report.oom or report.growth or report.graph_growth or report.interrupts else None,
        size_bytes=report.rss_peak_bytes if report.is_light else report.peak_bytes,
        sites=kept + tuple((site.module or site.category, size, site.location) for size, site in sizes[:_MOST_SITES]),
    )


def _size_bytes(site: Site, steps_count: int) -> int:
    """Bytes that the site keeps or, if more, allocates in a step."""
    return max(site.live_bytes, site.allocated_bytes // max(1, steps_count))
