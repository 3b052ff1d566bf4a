"""The process around the tensors: its own memory, its limit, and what CUDA's allocator holds."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch

from torchdebug_magics.instruments.memtrace.ledger.blocks import Book, Ledger
from torchdebug_magics.instruments.memtrace.trace import DeviceMemory, TraceMark
from torchdebug_magics.machine.process import PeakRss, rss_bytes
from torchdebug_magics.memory.accelerators import Allocator
from torchdebug_magics.memory.gauges import Gauges
from torchdebug_magics.memory.marks import ledger as marks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.report import Gauge, Mark


class ProcessMemory:
    """Exact peaks from the system's counter; gauges for the live view; the marks that the cell takes."""

    def __init__(self, guard: Guard, ledger: Ledger) -> None:
        self.marks: list[tuple[TraceMark, int]] = []
        """Each with the clock of the ledger."""
        self._ledger = ledger
        self._gauges = Gauges(guard)
        self._peak = PeakRss()
        self._start_bytes = self._start_free_bytes = 0
        self._before: dict[str, Allocator] = {}
        """The allocator of each device as it stood at the start."""
        self._lock = threading.Lock()
        self._is_open = False
        self._stack = ExitStack()

    def attach(self, stack: ExitStack) -> None:
        """From now on."""
        stack.callback(self.stop)
        self._stack.enter_context(self._gauges)
        self._stack.enter_context(marks().told_to(self._set))
        self._start_bytes, self._start_free_bytes = rss_bytes(), kept_free_bytes()
        self._before = {allocator.device: allocator for allocator in self._gauges.allocators()}
        self._peak.start()
        self._is_open = True

    def stop(self) -> None:
        """Harmless the second time."""
        with self._lock:
            self._is_open = False
            self._peak.stop()
            self._stack.close()

    def _set(self, mark: Mark) -> None:
        ledger = self._ledger
        ledger.settle()
        self.marks.append((TraceMark(**vars(mark), torch_bytes=ledger.total.now_bytes, phase=ledger.span.phase), ledger.clock))

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

    def unused_bytes(self) -> int:
        """What torch's caching allocators have reserved and not given out; 0 on the CPU."""
        return sum(allocator.reserved_bytes - allocator.allocated_bytes for allocator in self._gauges.allocators())

    def devices(self) -> tuple[DeviceMemory, ...]:
        """The memory of every device that was followed, or has an allocator of its own."""
        books = self._ledger.devices
        now = {allocator.device: allocator for allocator in self._gauges.allocators()}
        return tuple(_device(name, books.get(name), self._before.get(name), now.get(name)) for name in dict.fromkeys((*books, *now)))


def _device(name: str, book: Book | None, before: Allocator | None, now: Allocator | None) -> DeviceMemory:
    net_bytes, peak_bytes = (0, 0) if book is None else (book.now_bytes - book.start_bytes, book.peak_bytes)
    if now is None:
        return DeviceMemory(device=name, net_bytes=net_bytes, peak_bytes=peak_bytes)
    # A counter that stood as high before the cell says nothing of it; a device that was not in use then has counted nothing.
    peak, reserved_peak = (0, 0) if before is None else (before.peak_bytes, before.peak_reserved_bytes)
    return DeviceMemory(
        device=name,
        net_bytes=net_bytes,
        peak_bytes=peak_bytes,
        allocated_bytes=now.allocated_bytes,
        allocated_peak_bytes=now.peak_bytes if now.peak_bytes > peak else None,
        reserved_bytes=now.reserved_bytes,
        reserved_peak_bytes=now.peak_reserved_bytes if now.peak_reserved_bytes > reserved_peak else None,
    )


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def given_out_bytes() -> int | None:
    """By the C heap of this process, and by CUDA's allocator where that runs; None where the system does not tell."""
    ask = _mallinfo()
    if ask is None:
        return None
    info = ask()
    on_cuda = (
        sum(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"] for index in range(torch.cuda.device_count()))
        if torch.cuda.is_initialized()  # never ours to wake
        else 0
    )
    return int(info.uordblks + info.hblkhd) + on_cuda


def kept_free_bytes() -> int:
    """What was freed and is still the C heap's, at most as large in memory; 0 where the system does not tell."""
    ask = _mallinfo()
    return 0 if ask is None else int(ask().fordblks)


@functools.cache
def _mallinfo() -> Callable[[], _Info] | None:
    """Glibc's own counter, since 2.33; macOS, Windows and musl have none."""
    if not sys.platform.startswith("linux"):
        return None
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Info
    found: Callable[[], _Info] = ask
    return found
