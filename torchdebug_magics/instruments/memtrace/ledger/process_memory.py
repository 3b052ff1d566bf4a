"""The process around the tensors: what its C heap and the devices' allocators hold."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable

import torch

from torchdebug_magics.instruments.memtrace.ledger.blocks import Book, Ledger
from torchdebug_magics.instruments.memtrace.trace import DeviceMemory
from torchdebug_magics.memory.accelerators import Allocator


def device_memory(ledger: Ledger, before: Iterable[Allocator], now: Iterable[Allocator]) -> tuple[DeviceMemory, ...]:
    """The memory of every device that was followed, or has an allocator of its own; those as they stood at the start, and now."""
    earlier, later = ({allocator.device: allocator for allocator in allocators} for allocators in (before, now))
    names = dict.fromkeys((*ledger.devices, *later))
    return tuple(_device(name, ledger.devices.get(name), earlier.get(name), later.get(name)) for name in names)


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
