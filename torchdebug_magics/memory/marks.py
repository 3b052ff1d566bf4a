"""The memory at moments that the user names: every mark of this process, in order."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchdebug_magics.machine.gpus import Gpu
from torchdebug_magics.machine.limits import Limit
from torchdebug_magics.machine.process import rss_bytes
from torchdebug_magics.memory.accelerators import Allocator
from torchdebug_magics.memory.gauges import Gauges
from torchdebug_magics.probing.this_rank import rank
from torchdebug_magics.report import Mark


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
            before = self._marks[-1] if self._marks else None
            mark = _mark(label, before, limit, device)
            self._marks.append(mark)
        for listener in tuple(self._listeners):
            listener(mark)
        return mark


def _mark(label: str, before: Mark | None, limit: Limit | None, device: tuple[Allocator, Gpu | None] | None) -> Mark:
    return Mark(
        label=label,
        rank=rank(),
        rss_bytes=rss_bytes(),
        limit="" if limit is None else limit.whose,
        limit_used_bytes=None if limit is None else limit.limit_bytes - limit.left_bytes,
        limit_bytes=None if limit is None else limit.limit_bytes,
        **({} if device is None else _of_device(*device, before)),
    )


def _of_device(allocator: Allocator, gpu: Gpu | None, before: Mark | None) -> dict[str, Any]:
    earlier_bytes = before.max_allocated_bytes or 0 if before is not None and before.device == allocator.label else 0
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
