"""What a gauge reports: growth and peaks, what was left of the limit, and whether the guard interrupted the cell."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, capitalised
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.ranks.compared import Compared
from torchdebug_magics.report import Gauge, Report

_SMALL = 0.02
"""Of the limit: below this, what other processes use is not mentioned."""
_NOISE_BYTES = 1 << 20
"""A smaller change is none: Python's own memory moves by as much."""


@dataclass(frozen=True)
class DevicePeak:
    """Torch's peak of allocated memory on one device."""

    label: str
    peak_bytes: int
    total_bytes: int | None
    is_exact: bool
    """False where torch's counter was higher before the cell, and is not reset: then the largest sample."""


@dataclass(frozen=True)
class LiveGauges:
    """The gauges while the session is open."""

    gauges: tuple[Gauge, ...]
    rss_peak_bytes: int
    interrupts: tuple[Interrupt, ...]


@dataclass(frozen=True, kw_only=True)
class GaugeReport(Report):
    """The memory used by one cell, or between ``on`` and ``off``."""

    rss_start_bytes: int
    rss_end_bytes: int
    rss_peak_bytes: int
    rss_peak_is_exact: bool
    """False where the system has no counter for this period; then the largest sample."""
    limit_bytes: int | None
    """The limit with the least left; None where no limit is known."""
    limit: str
    """What the limit belongs to, such as ``"container limit"``."""
    limit_peak_bytes: int | None
    """The peak of what this process and others use of it."""
    devices: tuple[DevicePeak, ...]
    interrupts: tuple[Interrupt, ...]
    gauges: tuple[Gauge, ...]
    """All gauges at the end."""

    course_bytes: tuple[int, ...] = ()
    """The memory of this process over time, at equal distances: the most in each stretch."""
    duration_s: float = 0.0
    holders: tuple[tuple[str, int], ...] = ()
    """After the guard has stopped a cell: variables and the bytes that they hold, the largest first."""

    @property
    def grown_bytes(self) -> int:
        """By how much the process is larger at the end than at the start."""
        return self.rss_end_bytes - self.rss_start_bytes

    @property
    def left_bytes(self) -> int | None:
        """What was left of the limit at the peak."""
        if self.limit_bytes is None or self.limit_peak_bytes is None:
            return None
        return max(0, self.limit_bytes - self.limit_peak_bytes)

    @property
    def verdict(self) -> str:
        """The growth, the peak and what was left, or the guard's interrupt; and what the page says of it."""
        return " · ".join([self.title, *(f"{name}: {text}" for name, text in self.rows())])

    def rows(self) -> tuple[tuple[str, str], ...]:
        """What the guard did and who holds the memory; or the limit, who else uses it, and the devices where there are several."""
        if self.interrupts:
            known = [
                ("guard", self.interrupts[-1].action()),
                ("held by", ", ".join(f"`{name}` {byte_size(size_bytes)}" for name, size_bytes in self.holders)),
            ]
        else:
            used = [device for device in self.devices if device.peak_bytes]
            known = [("limit", self._limit(is_long=bool(used))), ("devices", "; ".join(map(device_peak, used)) if len(used) > 1 else "")]
        return tuple((name, text) for name, text in known if text)

    def _limit(self, *, is_long: bool) -> str:
        if self.limit_bytes is None or self.limit_peak_bytes is None or self.left_bytes is None:
            return "no memory limit is known"
        others_bytes = self.limit_peak_bytes - self.rss_peak_bytes
        shared = f"; other processes use {byte_size(others_bytes)} of it" if others_bytes > _SMALL * self.limit_bytes else ""
        left = f"; {byte_size(self.left_bytes)} left at the peak" if is_long else ""
        return f"{byte_size(self.limit_bytes)} ({self.limit}){left}{shared}"

    @property
    def title(self) -> str:
        """The growth and what was left; the fullest device first."""
        if self.interrupts:
            return f"Stopped by guard at {self.interrupts[-1].reached}"
        used = [device for device in self.devices if device.peak_bytes]
        if used:
            fullest = max(used, key=lambda one: one.peak_bytes / (one.total_bytes or one.peak_bytes))
            return f"{capitalised(device_peak(fullest))}; p{self._growth()[1:]}"
        left = "" if self.left_bytes is None else f"; {byte_size(self.left_bytes)} of {byte_size(self.limit_bytes or 0)} left"
        at_least = "" if self.rss_peak_is_exact else "at least "
        return f"{self._growth()}, peak {at_least}{byte_size(self.rss_peak_bytes)}{left}"

    def _growth(self) -> str:
        if self.grown_bytes >= _NOISE_BYTES:
            return f"Process grew by {byte_size(self.grown_bytes)}"
        if self.grown_bytes <= -_NOISE_BYTES:
            return f"Process shrank by {byte_size(-self.grown_bytes)}"
        return "Process did not grow"


def device_peak(one: DevicePeak) -> str:
    """``GPU 0 peak 5.0 GiB of 16.0 GiB``."""
    of = "" if one.total_bytes is None else f" of {byte_size(one.total_bytes)}"
    at_least = "" if one.is_exact else "at least "
    return f"{one.label.partition(' · ')[0]} peak {at_least}{byte_size(one.peak_bytes)}{of}"


def compared(report: GaugeReport) -> Compared:
    """Its peaks, on every device and of the process."""
    peaks = (("this process", report.rss_peak_bytes), *((device.label, device.peak_bytes) for device in report.devices))
    return Compared(
        found_at=(0, 0) if report.interrupts else None,
        size_bytes=sum(size for _, size in peaks),
        sites=tuple((what, size, None) for what, size in peaks),
    )
