"""Reads the gauges while the session is open, and the counters of the peaks at its end."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.memgauge.report import DevicePeak, GaugeReport, LiveGauges
from torchdebug_magics.machine.limits import GUARD_EVERY_S
from torchdebug_magics.machine.process import RssCourse, rss_bytes
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.memory.gauges import Allocator, GaugedProbe

_EVERY_S = 0.5
_LEAST_PART = 0.02
"""Of what the largest holder holds: less is not worth naming."""


class GaugeProbe(GaugedProbe):
    """One cell's gauges. What others use of the limit is sampled; all that is this process's own is counted."""

    def __init__(self, _: CellContext = SCRIPT, *, guard: str | float | None = None) -> None:
        super().__init__(guard)
        self._sampler = Sampler(self._look, name="gauge", every_s=_EVERY_S if guard is None else GUARD_EVERY_S)
        self._course = RssCourse()
        self._start_s = time.monotonic()
        self._others_bytes = 0
        self._seen: dict[str, int] = {}
        """The most that was seen allocated on each device."""
        self._latest: LiveGauges | None = None
        self._latest_at_s = 0.0
        self._report: GaugeReport | None = None

    def attach(self, stack: ExitStack) -> None:
        """Start to look."""
        self.begin(stack)
        self._start_s = time.monotonic()
        self._course.add(self.start_bytes)
        stack.callback(self.report)
        stack.enter_context(self._sampler)

    def sweep(self) -> None:
        """Stop the thread, if an interrupt came between."""
        self._sampler.stop()
        self.stop()

    def shown(self) -> LiveGauges:
        """The gauges of this half of a second: to send more costs more than to read."""
        now_s, latest = time.monotonic(), self._latest
        if latest is None or latest.interrupts != self.interrupts or now_s - self._latest_at_s >= _EVERY_S:
            latest = LiveGauges(self.gauges.read(), self.peak.peak().size_bytes, self.interrupts)
            self._latest, self._latest_at_s = latest, now_s
        return latest

    def report(self) -> GaugeReport:
        """As frozen when the session was left."""
        self._report = self._report or self._frozen()
        return self._report

    def _look(self) -> None:
        if self.memory_guard is not None:
            self.memory_guard.look()
        self._sample()

    def _sample(self) -> None:
        """What has no counter of its own: others' usage, and devices whose counter stood higher before."""
        rss = rss_bytes()
        self.peak.sample(rss)
        self._course.add(rss)
        limit = self.gauges.limit()
        if limit is not None:
            self._others_bytes = max(self._others_bytes, limit.limit_bytes - limit.left_bytes - rss)
        for allocator in self.gauges.allocators():
            self._seen[allocator.label] = max(self._seen.get(allocator.label, 0), allocator.allocated_bytes)

    def _frozen(self) -> GaugeReport:
        peak = self.peak.peak()
        self.guard.run("the last look at the memory", self._sample)
        if self._sampler.failure is not None:
            self.guard.note(f"the sampler stopped: {self._sampler.failure}")
        limit = self.gauges.limit()
        gauges = self.gauges.read()
        return GaugeReport(
            rss_start_bytes=self.start_bytes,
            rss_end_bytes=rss_bytes(),
            rss_peak_bytes=peak.size_bytes,
            rss_peak_is_exact=peak.source == "counter",
            limit_bytes=None if limit is None else limit.limit_bytes,
            limit="" if limit is None else limit.whose,
            # Others' usage on top of our own peak: no more than the limit itself.
            limit_peak_bytes=None if limit is None else min(limit.limit_bytes, peak.size_bytes + self._others_bytes),
            devices=tuple(self._device(allocator) for allocator in self.gauges.allocators()),
            interrupts=self.interrupts,
            gauges=gauges,
            course_bytes=self._course.points,
            duration_s=time.monotonic() - self._start_s,
            holders=self._holders(),
            problems=tuple(self.guard.problems),
        )

    def _holders(self) -> tuple[tuple[str, int], ...]:
        """Who holds the memory at which the guard has stopped the cell; only where torch is imported anyway."""
        if not self.interrupts or "torch" not in sys.modules:
            return ()
        from torchdebug_magics.memory.found import largest_holders  # noqa: PLC0415 - it imports torch

        error = sys.exc_info()[1]
        held = [] if error is None else [("the interrupted call", error)]
        found = self.guard.run("the look for who holds the memory", largest_holders, held) or ()
        return tuple((name, size_bytes) for name, size_bytes in found if size_bytes > _LEAST_PART * found[0][1])

    def _device(self, now: Allocator) -> DevicePeak:
        before = self.allocators_before.get(now.label)
        exact = now.peak_bytes > (0 if before is None else before.peak_bytes)
        seen = max(self._seen.get(now.label, 0), now.allocated_bytes)
        return DevicePeak(now.label, now.peak_bytes if exact else seen, now.total_bytes, exact)


watch = GaugeProbe
