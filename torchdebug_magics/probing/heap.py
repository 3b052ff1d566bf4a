"""How much memory is given out, by a counter that costs next to nothing to read."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch


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
    return int(info.uordblks + info.hblkhd) + _on_cuda()


def kept_free_bytes() -> int:
    """What was freed and is still the C heap's, at most as large in memory; 0 where the system does not tell."""
    ask = _mallinfo()
    return 0 if ask is None else int(ask().fordblks)


def _on_cuda() -> int:
    if not torch.cuda.is_initialized():  # never ours to wake
        return 0
    return sum(torch._C._cuda_memoryStats(index)["allocated_bytes"]["all"]["current"] for index in range(torch.cuda.device_count()))


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
