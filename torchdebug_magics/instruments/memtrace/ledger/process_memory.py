"""The process around the tensors: its own memory, its limit, and what CUDA's allocator holds."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torchdebug_magics.machine.process import PeakRss, rss_bytes
from torchdebug_magics.probing.gauges import Gauges
from torchdebug_magics.probing.heap import kept_free_bytes

if TYPE_CHECKING:
    from torchdebug_magics.probing.accelerators import Allocator
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.report import Gauge

__all__ = ["ProcessMemory"]


class ProcessMemory:
    """Exact peaks from the system's counter; gauges for the live view."""

    def __init__(self, guard: Guard) -> None:
        self._gauges = Gauges(guard)
        self._peak = PeakRss()
        self._start_bytes = self._start_free_bytes = 0
        self._lock = threading.Lock()
        self._is_open = False
        self._stack = ExitStack()

    def attach(self, stack: ExitStack) -> None:
        """From now on."""
        self._stack.enter_context(self._gauges)
        stack.callback(self.stop)
        self._start_bytes, self._start_free_bytes = rss_bytes(), kept_free_bytes()
        self._peak.start()
        self._is_open = True

    def stop(self) -> None:
        """Harmless the second time."""
        with self._lock:
            self._is_open = False
            self._peak.stop()
            self._stack.close()

    def gauges(self) -> tuple[Gauge, ...] | None:
        """As they stand; None when it is over."""
        with self._lock:
            return self._gauges.read() if self._is_open else None

    def peak_bytes(self) -> int:
        """The most that the process occupied."""
        return self._peak.peak().size_bytes

    def net_bytes(self) -> int:
        """What it occupies beyond what it did at the start."""
        return rss_bytes() - self._start_bytes

    def heap_kept_bytes(self) -> int:
        """Of that, at most, what was freed and is still the C heap's."""
        return max(0, min(self.net_bytes(), kept_free_bytes() - self._start_free_bytes))

    def limit(self) -> tuple[int | None, str]:
        """(bytes, whose) of the limit that ends the process."""
        found = self._gauges.limit()
        return (None, "") if found is None else (found.limit_bytes, found.whose)

    def allocators(self) -> list[Allocator]:
        """What torch's caching allocators hold; empty on the CPU."""
        return list(self._gauges.allocators())
