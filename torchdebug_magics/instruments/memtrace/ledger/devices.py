"""Each device's torch memory: as followed here, and as its allocator counts, whose counters are read and never reset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.report import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchdebug_magics.instruments.memtrace.ledger.blocks import Book
    from torchdebug_magics.instruments.memtrace.ledger.process_memory import ProcessMemory
    from torchdebug_magics.probing.accelerators import Allocator

__all__ = ["Devices"]


class Devices:
    """Of one cell."""

    def __init__(self, process: ProcessMemory) -> None:
        self._process = process
        self._before: dict[str, Allocator] = {}

    def start(self) -> None:
        """From now on; a device that is not in use yet has counted nothing."""
        self._before = {one.device: one for one in self._process.allocators()}

    def memory(self, books: Mapping[str, Book]) -> tuple[DeviceMemory, ...]:
        """Of every device that was followed, or has an allocator of its own."""
        now = {one.device: one for one in self._process.allocators()}
        return tuple(self._device(name, books.get(name), now.get(name)) for name in dict.fromkeys((*books, *now)))

    def _device(self, name: str, book: Book | None, now: Allocator | None) -> DeviceMemory:
        followed = (0, 0) if book is None else (book.now_bytes - book.start_bytes, book.peak_bytes)
        if now is None:
            return DeviceMemory(device=name, net_bytes=followed[0], peak_bytes=followed[1])
        before = self._before.get(name)
        return DeviceMemory(
            device=name,
            net_bytes=followed[0],
            peak_bytes=followed[1],
            allocated_bytes=now.allocated_bytes,
            allocated_peak_bytes=_risen(now.peak_bytes, 0 if before is None else before.peak_bytes),
            reserved_bytes=now.reserved_bytes,
            reserved_peak_bytes=_risen(now.peak_reserved_bytes, 0 if before is None else before.peak_reserved_bytes),
        )


def _risen(now_bytes: int, before_bytes: int) -> int | None:
    """A counter that stood as high before says nothing of this cell."""
    return now_bytes if now_bytes > before_bytes else None
