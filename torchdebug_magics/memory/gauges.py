"""Gauges of every memory that a cell can run out of: this process, its workers, the limit that binds, each GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from torchdebug_magics.format import byte_size, plural
from torchdebug_magics.machine.gpus import Gpu, Gpus
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.machine.limits import Limit, Limits
from torchdebug_magics.machine.memory_guard import MemoryGuard, guard_ratio
from torchdebug_magics.machine.process import PeakRss, Worker, rss_bytes, workers
from torchdebug_magics.memory.accelerators import Allocator, Allocators
from torchdebug_magics.probing.safety import Guard, traceback_of
from torchdebug_magics.report import Gauge

_WORKERS_EVERY_S = 2.0
"""Between two looks at the workers: for each, the system adds up all its pages."""


class Gauges:
    """Opens what a reading needs, once. Torch is looked at only where the user has imported it, CUDA only where it is initialised."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._stack = ExitStack()
        self._gpus = Gpus()
        self._limits = Limits(counts_kills=False)
        self._allocators = Allocators()
        self._workers: tuple[Worker, ...] = ()
        self._workers_at_s = -_WORKERS_EVERY_S

    def __enter__(self) -> Self:
        self._stack.enter_context(self._gpus)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self) -> tuple[Gauge, ...]:
        """Every gauge as it is now; what fails is left out, and is one line of the guard's."""
        limit = self._guard.run("reading the memory limit", self._limits.binding)
        found = [
            *(self._guard.run("reading this process's memory", _process, limit) or ()),
            *(self._guard.run("reading the workers' memory", self._of_workers, limit) or ()),
            *([] if limit is None else [_of_limit(limit)]),
            *(self._guard.run("reading the GPUs", self._of_gpus) or ()),
        ]
        return tuple(found)

    def limit(self) -> Limit | None:
        """The limit that will be reached first, as it is now."""
        return self._guard.run("reading the memory limit", self._limits.binding)

    def allocators(self) -> list[Allocator]:
        """What torch holds on each device that is in use."""
        return self._guard.run("reading torch's allocators", self._allocators.read) or []

    def current(self) -> tuple[Allocator, Gpu | None] | None:
        """Torch's current device, and the same as its driver sees it; None where none is in use."""
        found = self.allocators()
        current = self._allocators.current(found)
        if current is None:
            return None
        same = [gpu for at, gpu in enumerate(self._gpus.read()) if self._allocators.of(at, gpu.uuid, found) is current]
        return current, next(iter(same), None)

    def _of_workers(self, limit: Limit | None) -> list[Gauge]:
        now_s = time.monotonic()
        if now_s - self._workers_at_s >= _WORKERS_EVERY_S:
            self._workers, self._workers_at_s = workers(), now_s
        if not self._workers:
            return []
        used_bytes = sum(worker.pss_bytes for worker in self._workers)
        own_bytes = sum(worker.uss_bytes for worker in self._workers)
        label = f"{plural(len(self._workers), 'worker')} (PSS)"
        return [Gauge(label, used_bytes, _size(limit), note=f"{byte_size(own_bytes)} would be freed if they ended")]

    def _of_gpus(self) -> list[Gauge]:
        allocators = self._allocators.read()
        gpus = self._gpus.read()
        if gpus:
            known = [(at, gpu, self._allocators.of(at, gpu.uuid, allocators)) for at, gpu in enumerate(gpus)]
            known.sort(key=lambda one: one[0] if one[2] is None else one[2].number)
            return [_gpu(*one, is_used=bool(allocators)) for one in known]
        if allocators:  # AMD, Intel, Apple, or a driver that does not answer: the allocator alone
            return [_allocator(allocator, self._gpus.problem) for allocator in allocators]
        return [Gauge("GPU", 0, None, note=self._allocators.built_without or self._gpus.problem)]


def _process(limit: Limit | None) -> list[Gauge]:
    return [Gauge("this process (RSS)", rss_bytes(), _size(limit))]


def _size(limit: Limit | None) -> int | None:
    return None if limit is None else limit.limit_bytes


def _of_limit(limit: Limit) -> Gauge:
    """Counted as the system does before it kills: without the file cache that it drops first."""
    used_bytes = limit.limit_bytes - limit.left_bytes
    cache_bytes = limit.used_bytes - used_bytes
    note = f"and {byte_size(cache_bytes)} of file cache, dropped when needed" if cache_bytes else ""
    return Gauge(limit.whose, used_bytes, limit.limit_bytes, note=note)


def _gpu(at: int, gpu: Gpu, allocator: Allocator | None, *, is_used: bool) -> Gauge:
    """Parts that add up to what the driver says."""
    if allocator is None:
        note = "" if is_used else "all processes; CUDA is not used here so far"
        return Gauge(f"GPU {at} · {gpu.name}", gpu.used_bytes, gpu.total_bytes, note=note)
    others_bytes = gpu.others_bytes
    rest_bytes = max(0, gpu.used_bytes - allocator.reserved_bytes - (others_bytes or 0))
    rest = "unaccounted (context, NCCL)" if others_bytes is not None else "unaccounted (context, NCCL, other processes)"
    parts = [*_held(allocator), (rest, rest_bytes)]
    if others_bytes:
        parts.append(("other processes", others_bytes))
    return Gauge(allocator.label, gpu.used_bytes, gpu.total_bytes, tuple(parts))


def _allocator(one: Allocator, problem: str) -> Gauge:
    return Gauge(one.label, one.reserved_bytes, one.total_bytes, tuple(_held(one)), note=problem if one.label.startswith("GPU") else "")


def _held(allocator: Allocator) -> Iterator[tuple[str, int]]:
    yield "allocated", allocator.allocated_bytes
    yield "reserved beyond that", allocator.reserved_bytes - allocator.allocated_bytes


class GaugedProbe:
    """What every probe of memory has: the guard, the gauges, and the exact peak of the process since the start."""

    def __init__(self, guard: str | float | None) -> None:
        self.guard = Guard()
        self.memory_guard = None if guard is None else MemoryGuard(guard_ratio(guard), Limits(counts_kills=False))
        if self.memory_guard is not None:
            self.memory_guard.refuse_if_passed()
        self.gauges = Gauges(self.guard)
        self.peak = PeakRss()
        self.start_bytes = 0
        self.allocators_before: dict[str, Allocator] = {}
        """As they stood at the start, by their labels."""
        self._opened = ExitStack()
        self._lock = threading.Lock()
        self._is_open = False

    @property
    def interrupts(self) -> tuple[Interrupt, ...]:
        """The guard's."""
        return () if self.memory_guard is None else self.memory_guard.interrupts

    def begin(self, stack: ExitStack) -> None:
        """Open the driver's library, begin the peak."""
        stack.callback(self.stop)
        self._opened.enter_context(self.gauges)
        self.start_bytes = rss_bytes()
        self.allocators_before = {allocator.label: allocator for allocator in self.gauges.allocators()}
        self.peak.start()
        self._is_open = True

    def stop(self) -> None:
        """Harmless the second time."""
        with self._lock:
            self._is_open = False
            self.peak.stop()
            self._opened.close()

    def live(self) -> object | None:
        """The gauges as they stand, None when it is over; any thread may ask."""
        with self._lock:
            return self.shown() if self._is_open else None

    def shown(self) -> object:
        """What the live view is made of."""
        return self.gauges.read()

    def standing(self) -> str:
        """Nothing: progress is not watched here. The kernel's position is recorded, as one that takes too much memory is killed."""
        return ""

    def traceback_of(self, error: BaseException) -> list[str]:
        """Of the guard's interrupt."""
        return traceback_of(error, "" if self.memory_guard is None else self.memory_guard.reason)

    def kept(self) -> dict[str, object]:
        """Nothing is kept."""
        return {}
