"""Reads the gauges while the session is open, and the counters of the peaks at its end."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack

from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.memgauge.report import DevicePeak, GaugeReport, LiveGauges
from torchdebug_magics.machine.limits import Limits
from torchdebug_magics.machine.memory_guard import GUARD_EVERY_S, MemoryGuard, guard_ratio
from torchdebug_magics.machine.process import PeakRss, RssCourse, rss_bytes
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.memory.accelerators import Allocator
from torchdebug_magics.memory.gauges import Gauges
from torchdebug_magics.probing.safety import Guard, traceback_of

_EVERY_S = 0.5
_LEAST_PART = 0.02
"""Of what the largest holder holds: less is not worth naming."""


class GaugeProbe:
    """One cell's gauges. What others use of the limit is sampled; all that is this process's own is counted."""

    def __init__(self, _: CellContext = SCRIPT, *, guard: str | float | None = None) -> None:
        self._guard = Guard()
        self._memory_guard = None if guard is None else MemoryGuard(guard_ratio(guard), Limits(counts_kills=False))
        if self._memory_guard is not None:
            self._memory_guard.refuse_if_passed()
        self._gauges = Gauges(self._guard)
        self._sampler = Sampler(self._look, name="gauge", every_s=_EVERY_S if guard is None else GUARD_EVERY_S)
        self._peak = PeakRss()
        self._course = RssCourse()
        self._start_s = 0.0
        self._lock = threading.Lock()
        self._is_open = False
        self._start_bytes = 0
        self._others_bytes = 0
        self._devices: dict[str, int] = {}
        """Torch's own peak counters as they stood at the start."""
        self._seen: dict[str, int] = {}
        """The most that was seen allocated on each device."""
        self._latest: LiveGauges | None = None
        self._latest_at_s = 0.0
        self._report: GaugeReport | None = None

    def attach(self, stack: ExitStack) -> None:
        """Open the driver's library, begin the peak, start to look."""
        stack.enter_context(self._gauges)
        stack.callback(self._peak.stop)
        self._start_bytes = rss_bytes()
        self._start_s = time.monotonic()
        self._course.add(self._start_bytes)
        self._devices = {allocator.label: allocator.peak_bytes for allocator in self._gauges.allocators()}
        self._peak.start()
        self._is_open = True
        stack.callback(self._end)
        stack.enter_context(self._sampler)

    def sweep(self) -> None:
        """Stop the thread, if an interrupt came between."""
        self._sampler.stop()
        self._peak.stop()

    def live(self) -> object | None:
        """The gauges of this half of a second: to send more costs more than to read."""
        with self._lock:
            if not self._is_open:
                return None
            interrupts = () if self._memory_guard is None else self._memory_guard.interrupts
            now_s = time.monotonic()
            latest = self._latest
            if latest is None or latest.interrupts != interrupts or now_s - self._latest_at_s >= _EVERY_S:
                latest = LiveGauges(self._gauges.read(), self._peak.peak().size_bytes, interrupts)
                self._latest, self._latest_at_s = latest, now_s
            return latest

    def standing(self) -> str:
        """Nothing: progress is not watched here. The kernel's position is recorded, as one that takes too much memory is killed."""
        return ""

    def traceback_of(self, error: BaseException) -> list[str]:
        """Of the guard's interrupt."""
        return traceback_of(error, "" if self._memory_guard is None else self._memory_guard.reason)

    def kept(self) -> dict[str, object]:
        """Nothing."""
        return {}

    def report(self) -> GaugeReport:
        """As frozen when the session was left."""
        if self._report is None:
            self._end()
        assert self._report is not None
        return self._report

    def _look(self) -> None:
        if self._memory_guard is not None:
            self._memory_guard.look()
        self._sample()

    def _sample(self) -> None:
        """What has no counter of its own: others' usage, and devices whose counter stood higher before."""
        rss = rss_bytes()
        self._peak.sample(rss)
        self._course.add(rss)
        limit = self._gauges.limit()
        if limit is not None:
            self._others_bytes = max(self._others_bytes, limit.limit_bytes - limit.left_bytes - rss)
        for allocator in self._gauges.allocators():
            self._seen[allocator.label] = max(self._seen.get(allocator.label, 0), allocator.allocated_bytes)

    def _end(self) -> None:
        with self._lock:
            self._is_open = False
            if self._report is None:
                self._report = self._frozen()

    def _frozen(self) -> GaugeReport:
        peak = self._peak.peak()
        self._guard.run("the last look at the memory", self._sample)
        if self._sampler.failure is not None:
            self._guard.note(f"the sampler stopped: {self._sampler.failure}")
        limit = self._gauges.limit()
        gauges = self._gauges.read()
        return GaugeReport(
            rss_start_bytes=self._start_bytes,
            rss_end_bytes=rss_bytes(),
            rss_peak_bytes=peak.size_bytes,
            rss_peak_is_exact=peak.source == "counter",
            limit_bytes=None if limit is None else limit.limit_bytes,
            limit="" if limit is None else limit.whose,
            # Others' usage on top of our own peak: no more than the limit itself.
            limit_peak_bytes=None if limit is None else min(limit.limit_bytes, peak.size_bytes + self._others_bytes),
            devices=tuple(self._device(allocator) for allocator in self._gauges.allocators()),
            interrupts=() if self._memory_guard is None else self._memory_guard.interrupts,
            gauges=gauges,
            course_bytes=self._course.points,
            duration_s=time.monotonic() - self._start_s,
            holders=self._holders(),
            problems=tuple(self._guard.problems),
        )

    def _holders(self) -> tuple[tuple[str, int], ...]:
        """Who holds the memory at which the guard has stopped the cell; only where torch is imported anyway."""
        if self._memory_guard is None or not self._memory_guard.interrupts or "torch" not in sys.modules:
            return ()
        from torchdebug_magics.memory.python_weights import largest_holders  # noqa: PLC0415 - it imports torch

        error = sys.exc_info()[1]
        held = [] if error is None else [("the interrupted call", error)]
        found = self._guard.run("the look for who holds the memory", largest_holders, held) or ()
        return tuple((name, size_bytes) for name, size_bytes in found if size_bytes > _LEAST_PART * found[0][1])

    def _device(self, now: Allocator) -> DevicePeak:
        exact = now.peak_bytes > self._devices.get(now.label, 0)
        seen = max(self._seen.get(now.label, 0), now.allocated_bytes)
        return DevicePeak(now.label, now.peak_bytes if exact else seen, now.total_bytes, exact)


watch = GaugeProbe
