"""What this process and its children occupy, and the exact peak, from the system's own counters."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal
from weakref import WeakSet

_STATM, _STATUS, _CLEAR_REFS = Path("/proc/self/statm"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What resets the highest RSS, as proc(5) says, and nothing else."""
_KIB = 1024
_PATIENCE_MS = 10_000
_MOST = 240


def rss_bytes() -> int:
    """The physical memory that this process occupies now."""
    return _pages(1)


def own_bytes() -> int:
    """The part of `rss_bytes` that no file and no other process has; all of it where the system does not tell."""
    return rss_bytes() - (_pages(2) if _STATM.exists() else 0)


def address_space_bytes() -> int:
    """All addresses that this process has reserved, used or not."""
    return _pages(0)


def _pages(field: int) -> int:
    try:
        return int(_STATM.read_bytes().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil  # noqa: PLC0415 - only where the system has no /proc

        memory = psutil.Process().memory_info()
        return int(memory[1 - field])  # (rss, vms, ...)


@dataclass(frozen=True)
class Peak:
    """The highest RSS, and how it is known."""

    size_bytes: int
    source: Literal["counter", "samples"]
    """``"samples"``: only as high as it was seen, where the system has no counter for this time."""


class PeakRss:
    """The highest RSS of this process between `start` and now.

    Linux lets a process put its counter back. Where it does not, the counter of the process's whole life is still exact if it
    has risen; else only what was handed to `sample` is known.
    """

    _running: ClassVar[WeakSet[PeakRss]] = WeakSet()
    """The counter is one for the process: who resets it first lets the others read it."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._seen_bytes = 0
        """The highest before somebody else reset the counter, or in samples."""
        self._exact = False
        self._before_bytes: int | None = None
        self._final: Peak | None = None

    def start(self) -> None:
        """From now on."""
        with self._lock:
            highest_bytes = _counter_bytes()
            for other in self._running:
                other.sample(highest_bytes or 0)
            self._exact = _reset_counter()
            self._before_bytes = None if self._exact else _lifetime_bytes()
            self._seen_bytes = rss_bytes()
            self._running.add(self)

    def stop(self) -> None:
        """No more; `peak` goes on to tell of the time until now."""
        with self._lock:
            self._final = self.peak()
            self._running.discard(self)

    def sample(self, size_bytes: int) -> None:
        """Add what was seen at some moment."""
        self._seen_bytes = max(self._seen_bytes, size_bytes)

    def peak(self) -> Peak:
        """Between `start` and now, or `stop`."""
        if self._final is not None:
            return self._final
        if self._exact and (highest_bytes := _counter_bytes()) is not None:
            return Peak(max(highest_bytes, self._seen_bytes), "counter")
        life_bytes = _lifetime_bytes()
        if life_bytes is not None and self._before_bytes is not None and life_bytes > self._before_bytes:
            return Peak(life_bytes, "counter")
        return Peak(max(self._seen_bytes, rss_bytes()), "samples")


def _reset_counter() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return _counter_bytes() is not None


def _counter_bytes() -> int | None:
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:")), None)


def _lifetime_bytes() -> int | None:
    if (highest_bytes := _counter_bytes()) is not None:  # ru_maxrss would do, were it not handed on by who started this process
        return highest_bytes
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * _KIB


@dataclass(frozen=True)
class Worker:
    """A process that `multiprocessing` has started from here, such as a worker of a DataLoader."""

    pid: int
    pss_bytes: int
    """Its share: a page that n processes use counts one n-th. Sums of it are true, where sums of RSS count shared pages n times."""
    uss_bytes: int
    """What would be freed if this one ended."""


def workers() -> tuple[Worker, ...]:
    """Those that run now. The system adds up all pages of each: not for every sample."""
    import psutil  # noqa: PLC0415 - not for who only loads the extension

    found = []
    known = vars(sys.modules.get("multiprocessing.process", sys)).get("_children", ())  # active_children() would also reap the ended ones
    for pid in (child.pid for child in tuple(known) if child.pid is not None):
        with contextlib.suppress(psutil.Error):  # it has ended
            memory = psutil.Process(pid).memory_full_info()
            found.append(Worker(pid, getattr(memory, "pss", memory.uss), memory.uss))
    return tuple(found)


def trim_heap() -> bool:
    """Give back the pages that the C library keeps; False where it has no way to."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc; on Windows there is no such library
        return False
    trim(0)
    return True


def trimmable_bytes() -> int | None:
    """What `trim_heap` would give back; None where that cannot be measured. This process's own heap is left as it is.

    A fork has the same pages, trims its own, and says by how much it became smaller.
    """
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.PyDLL(None)  # it keeps the lock of the interpreter: the copy has this thread alone, and must not wait for another
    if not hasattr(library, "malloc_trim"):
        return None
    here, child = os.getpid(), -1
    try:
        reader, writer = os.pipe()
    except OSError:  # too many files are open
        return None
    try:
        child = library.fork()  # not by `os`, which runs what libraries have registered for their own children
        if child == 0:
            before = rss_bytes()
            library.malloc_trim(0)
            os.write(writer, str(max(0, before - rss_bytes())).encode())
    finally:
        if os.getpid() != here:
            os._exit(0)  # whatever came between: the copy never goes on in the user's code
        os.close(writer)
        answer = _answer(reader, child)
    return int(answer) if answer else None


def _answer(reader: int, child: int) -> bytes:
    """What the copy has written; it is waited for, and ended where it does not end by itself."""
    if child <= 0:  # there was no room for it
        os.close(reader)
        return b""
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    ready = waiting.poll(_PATIENCE_MS)
    answer = os.read(reader, 32) if ready else b""
    os.close(reader)
    with contextlib.suppress(OSError):
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return answer


class RssCourse:
    """Keeps the largest of each stretch of samples; the stretches are of equal length, and double when there are too many."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._points: list[int] = []
        self._stride = 1
        self._pending: list[int] = []

    def add(self, size_bytes: int) -> None:
        """One more sample."""
        self._pending.append(size_bytes)
        if len(self._pending) < self._stride:
            return
        self._points.append(max(self._pending))
        self._pending = []
        if len(self._points) > self._most:
            self._points = [max(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]
            self._stride *= 2

    @property
    def points(self) -> tuple[int, ...]:
        """In order, with the samples of the stretch that has not ended."""
        return (*self._points, *([max(self._pending)] if self._pending else []))
