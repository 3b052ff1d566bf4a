"""What the C library keeps of freed memory, and giving it back: measured beforehand in a copy of the process, which ends at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

from torchdebug_magics.machine.process import rss_bytes

__all__ = ["trim_heap", "trimmable_bytes"]

_PATIENCE_MS = 10_000


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
