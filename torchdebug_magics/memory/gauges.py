"""Gauges of every memory that a cell can run out of: this process, its workers, the limit that binds, each GPU; and the marks.

No device is initialised, and torch is never imported here: a gauge that did so would show mostly that.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torchdebug_magics.format import byte_size, plural
from torchdebug_magics.machine.gpus import Gpu, Gpus
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.machine.limits import Limit, Limits, MemoryGuard, guard_ratio
from torchdebug_magics.machine.process import PeakRss, Worker, rss_bytes, workers
from torchdebug_magics.probing.distributed.this_rank import rank
from torchdebug_magics.probing.safety import Guard, traceback_of
from torchdebug_magics.report import Gauge, Mark

_TORCH_NAMES = {"GPU": "cuda", "XPU": "xpu", "MPS": "mps"}
"""By the first word of a label."""
_WORKERS_EVERY_S = 2.0
"""Between two looks at the workers: for each, the system adds up all its pages."""


@dataclass(frozen=True)
class Allocator:
    """One device, as torch's allocator for it counts."""

    number: int
    """Torch's, which may be another than the driver's."""
    label: str
    uuid: str
    allocated_bytes: int
    """In tensors."""
    reserved_bytes: int
    """Taken from the driver, tensors included."""
    total_bytes: int | None
    peak_bytes: int
    """The most in tensors since the process began, or since somebody reset torch's counter; 0 where it has none."""
    peak_reserved_bytes: int = 0

    @property
    def device(self) -> str:
        """As torch writes it, such as ``cuda:0``."""
        return f"{_TORCH_NAMES[self.label.partition(' ')[0]]}:{self.number}"


class Allocators:
    """Reads every device that this process uses. The device's properties are asked once."""

    def __init__(self) -> None:
        self._properties: dict[int, tuple[str, str, int]] = {}

    @property
    def built_without(self) -> str:
        """Why torch here can use no GPU at all; empty where it could, or is not imported."""
        torch = _torch()
        version = getattr(torch, "version", None)
        if version is None or version.cuda or version.hip or _is_apple(torch) or getattr(version, "xpu", None):
            return ""
        return f"none: torch {version.__version__} is built for the CPU alone"

    def read(self) -> list[Allocator]:
        """All devices as they are now; empty where none is initialised."""
        torch = _torch()
        if torch is None:
            return []
        if torch.cuda.is_initialized():
            return list(self._cuda(torch))
        if torch.xpu.is_initialized():
            return list(_xpu(torch))
        return list(_mps(torch)) if _is_apple(torch) else []

    def _cuda(self, torch: Any) -> Iterator[Allocator]:
        for at in range(torch.cuda.device_count()):
            if at not in self._properties:
                known = torch.cuda.get_device_properties(at)
                self._properties[at] = (known.name, str(getattr(known, "uuid", "")), int(known.total_memory))
            name, uuid, total_bytes = self._properties[at]
            stats = torch.cuda.memory_stats_as_nested_dict(at)
            allocated, reserved = (stats.get(key, {}).get("all", {}) for key in ("allocated_bytes", "reserved_bytes"))
            now = (int(allocated.get("current", 0)), int(reserved.get("current", 0)))
            peaks = (int(allocated.get("peak", 0)), int(reserved.get("peak", 0)))
            yield Allocator(at, f"GPU {at} · {name}", uuid, *now, total_bytes, *peaks)


def _allocator_of(at: int, gpu: Gpu, allocators: list[Allocator]) -> Allocator | None:
    """The one for a GPU of the driver's: CUDA may number them in another order."""
    same = [allocator for allocator in allocators if allocator.uuid and allocator.uuid in gpu.uuid]
    return same[0] if same else allocators[at] if at < len(allocators) and not allocators[at].uuid else None


def _torch() -> Any:
    """As the user has imported it, and not while that still goes on in another thread."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def _xpu(torch: Any) -> Iterator[Allocator]:
    for at in range(torch.xpu.device_count()):
        known = torch.xpu.get_device_properties(at)
        now = (torch.xpu.memory_allocated(at), torch.xpu.memory_reserved(at))
        peaks = (torch.xpu.max_memory_allocated(at), torch.xpu.max_memory_reserved(at))
        yield Allocator(at, f"XPU {at} · {known.name}", "", *now, int(known.total_memory), *peaks)


def _mps(torch: Any) -> Iterator[Allocator]:
    allocated_bytes = torch.mps.current_allocated_memory()
    if allocated_bytes:  # it has no word for "not initialised"
        yield Allocator(0, "MPS", "", allocated_bytes, torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory(), 0)


def _is_apple(torch: Any) -> bool:
    return sys.platform == "darwin" and torch.backends.mps.is_available()


class Gauges:
    """Opens what a reading needs, once. Torch is looked at only where the user has imported it, CUDA only where it is initialised."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self._gpus = Gpus()
        self._limits = Limits(counts_kills=False)
        self._allocators = Allocators()
        self._workers: tuple[Worker, ...] = ()
        self._workers_at_s = -_WORKERS_EVERY_S

    def __enter__(self) -> Self:
        self._gpus.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gpus.__exit__(kind, error, trace)

    def read(self) -> tuple[Gauge, ...]:
        """Every gauge as it is now; what fails is left out, and is one line of the guard's."""
        limit = self.limit()
        limit_bytes = None if limit is None else limit.limit_bytes
        return (
            *(self._guard.run("reading this process's memory", lambda: [Gauge("this process (RSS)", rss_bytes(), limit_bytes)]) or ()),
            *(self._guard.run("reading the workers' memory", self._of_workers, limit_bytes) or ()),
            *([] if limit is None else [_of_limit(limit)]),
            *(self._guard.run("reading the GPUs", self._of_gpus) or ()),
        )

    def limit(self) -> Limit | None:
        """The limit that will be reached first, as it is now."""
        return self._guard.run("reading the memory limit", self._limits.binding)

    def allocators(self) -> list[Allocator]:
        """What torch holds on each device that is in use."""
        return self._guard.run("reading torch's allocators", self._allocators.read) or []

    def current(self) -> tuple[Allocator, Gpu | None] | None:
        """Torch's current device, and the same as its driver sees it; None where none is in use."""
        allocators, torch = self.allocators(), _torch()
        number = torch.cuda.current_device() if allocators and torch.cuda.is_initialized() else 0
        for current in (allocator for allocator in allocators if allocator.number == number):
            same = (gpu for at, gpu in enumerate(self._gpus.read()) if _allocator_of(at, gpu, allocators) is current)
            return current, next(same, None)
        return None

    def _of_workers(self, limit_bytes: int | None) -> list[Gauge]:
        now_s = time.monotonic()
        if now_s - self._workers_at_s >= _WORKERS_EVERY_S:
            self._workers, self._workers_at_s = workers(), now_s
        if not self._workers:
            return []
        used_bytes = sum(worker.pss_bytes for worker in self._workers)
        own_bytes = sum(worker.uss_bytes for worker in self._workers)
        label = f"{plural(len(self._workers), 'worker')} (PSS)"
        return [Gauge(label, used_bytes, limit_bytes, note=f"{byte_size(own_bytes)} would be freed if they ended")]

    def _of_gpus(self) -> list[Gauge]:
        allocators = self._allocators.read()
        gpus = self._gpus.read()
        if gpus:
            known = [(at, gpu, _allocator_of(at, gpu, allocators)) for at, gpu in enumerate(gpus)]
            known.sort(key=lambda seen: seen[0] if seen[2] is None else seen[2].number)
            return [_gpu(*seen, is_used=bool(allocators)) for seen in known]
        if allocators:  # AMD, Intel, Apple, or a driver that does not answer: the allocator alone
            notes = {"GPU": self._gpus.problem}
            return [
                Gauge(device.label, device.reserved_bytes, device.total_bytes, _held(device), notes.get(device.label.partition(" ")[0], ""))
                for device in allocators
            ]
        return [Gauge("GPU", 0, None, note=self._allocators.built_without or self._gpus.problem)]


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
    parts = (*_held(allocator), (rest, rest_bytes), *([("other processes", others_bytes)] if others_bytes else []))
    return Gauge(allocator.label, gpu.used_bytes, gpu.total_bytes, parts)


def _held(allocator: Allocator) -> tuple[tuple[str, int], ...]:
    beyond_bytes = allocator.reserved_bytes - allocator.allocated_bytes
    return ("allocated", allocator.allocated_bytes), ("reserved beyond that", beyond_bytes)


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


@functools.cache
def ledger() -> Ledger:
    """The one of this process: a mark that a script's function takes and one of a magic are rows of the same table."""
    return Ledger()


class Ledger:
    """Takes marks and keeps them. Plain numbers: nothing is held alive by a mark."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Mark], None]] = []

    @contextmanager
    def told_to(self, listener: Callable[[Mark], None]) -> Iterator[None]:
        """Meanwhile `listener` is called with each mark, in the thread that takes it."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def marks(self, since: int = 0) -> tuple[Mark, ...]:
        """All of them, or those after the first `since`."""
        with self._lock:
            return tuple(self._marks[since:])

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._marks.clear()

    def take(self, label: str) -> Mark:
        """Collect garbage, then read. No peak is reset, and no device is initialised."""
        for _ in range(2):  # the first pass frees graphs that hold others in a cycle
            gc.collect()
        with Gauges() as gauges:
            limit, device = gauges.limit(), gauges.current()
        with self._lock:
            mark = Mark(
                label=label,
                rank=rank(),
                rss_bytes=rss_bytes(),
                limit="" if limit is None else limit.whose,
                limit_used_bytes=None if limit is None else limit.limit_bytes - limit.left_bytes,
                limit_bytes=None if limit is None else limit.limit_bytes,
                **({} if device is None else _of_device(*device, self._marks[-1:])),
            )
            self._marks.append(mark)
        for listener in tuple(self._listeners):
            listener(mark)
        return mark


def _of_device(allocator: Allocator, gpu: Gpu | None, before: list[Mark]) -> dict[str, Any]:
    """What a mark says of torch's current device; `before` is the mark before it, where there is one."""
    earlier_bytes = max((mark.max_allocated_bytes or 0 for mark in before if mark.device == allocator.label), default=0)
    held: dict[str, Any] = {
        "device": allocator.label,
        "allocated_bytes": allocator.allocated_bytes,
        "max_allocated_bytes": allocator.peak_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "max_reserved_bytes": allocator.peak_reserved_bytes,
        "max_is_new": allocator.peak_bytes > earlier_bytes,
    }
    if gpu is not None:
        held["driver_bytes"] = gpu.used_bytes
        held["unaccounted_bytes"] = gpu.used_bytes - allocator.reserved_bytes - (gpu.others_bytes or 0)
    return held
