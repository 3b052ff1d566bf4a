"""What a gauge leaves behind: peaks, what was left, and whether the guard stepped in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size
from torchdebug_magics.report import Gauge, Report

if TYPE_CHECKING:
    from torchdebug_magics.machine.interrupts import Interrupt

__all__ = ["DevicePeak", "GaugeReport", "LiveGauges"]

_SMALL = 0.02
"""Of the limit: what others use below this is not worth a word."""


@dataclass(frozen=True)
class DevicePeak:
    """The most that torch had allocated on one device."""

    label: str
    peak_bytes: int
    total_bytes: int | None
    is_exact: bool
    """False where the counter stood higher from before, and was not reset: then as high as it was seen."""


@dataclass(frozen=True)
class LiveGauges:
    """While the session is open."""

    gauges: tuple[Gauge, ...]
    rss_peak_bytes: int
    interrupts: tuple[Interrupt, ...]


@dataclass(frozen=True, kw_only=True)
class GaugeReport(Report):
    """Of one cell, or of the time between ``on`` and ``off``."""

    rss_start_bytes: int
    rss_end_bytes: int
    rss_peak_bytes: int
    rss_peak_is_exact: bool
    """False where the system has no counter for this time; then as high as it was seen."""
    limit_bytes: int | None
    """Of the limit that came nearest; None where none is known."""
    limit: str
    """Whose it is, such as ``"container limit"``."""
    limit_peak_bytes: int | None
    """The most of it that was used, by this process and by others."""
    devices: tuple[DevicePeak, ...]
    interrupts: tuple[Interrupt, ...]
    gauges: tuple[Gauge, ...]
    """As they stood at the end."""

    @property
    def left_bytes(self) -> int | None:
        """Of the limit, at the peak."""
        if self.limit_bytes is None or self.limit_peak_bytes is None:
            return None
        return max(0, self.limit_bytes - self.limit_peak_bytes)

    @property
    def verdict(self) -> str:
        """The guard's, or the peak and what was left."""
        if self.interrupts:
            return str(self.interrupts[-1])
        return "; ".join([self._peak(), *(_device(one) for one in self.devices if one.peak_bytes)])

    def _peak(self) -> str:
        at_least = "" if self.rss_peak_is_exact else "at least "
        if self.limit_bytes is None or self.limit_peak_bytes is None or self.left_bytes is None:
            return f"Peak {at_least}{byte_size(self.rss_peak_bytes)}; no limit is known"
        of = f"of {byte_size(self.limit_bytes)} ({self.limit}): {byte_size(self.left_bytes)} were left"
        if abs(self.limit_peak_bytes - self.rss_peak_bytes) <= _SMALL * self.limit_bytes:
            return f"Peak {at_least}{byte_size(self.limit_peak_bytes)} {of}"
        return f"Peak {at_least}{byte_size(self.rss_peak_bytes)}, with all other processes {byte_size(self.limit_peak_bytes)} {of}"


def _device(one: DevicePeak) -> str:
    of = "" if one.total_bytes is None else f" of {byte_size(one.total_bytes)}"
    at_least = "" if one.is_exact else "at least "
    return f"{one.label.partition(' · ')[0]} {at_least}{byte_size(one.peak_bytes)}{of}"
