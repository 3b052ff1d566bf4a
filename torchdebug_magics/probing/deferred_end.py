"""A launcher ends all ranks with SIGTERM as soon as one of them fails: a rank that is looking into its own fault finishes that first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchdebug_magics.probing import this_rank

__all__ = ["end_deferred"]

_UNTIL_TOLD_S = 5.0
"""What was found becomes an error, and that a report; then the signal comes again."""


@contextmanager
def end_deferred() -> Iterator[None]:
    """Only in a process that was launched, and only while nothing in it waits for another rank: native code would never hear of SIGTERM."""
    is_launched = multiprocessing.parent_process() is not None or this_rank.world_size() > 1
    if not is_launched or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if came:
            end = threading.Timer(_UNTIL_TOLD_S, os.kill, (os.getpid(), signal.SIGTERM))
            end.daemon = True
            end.start()
