"""The Stop button, also where the main thread does not notice it: in native code, or asleep in its event loop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakSet

from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.code_owner import frames_above

__all__ = ["StopPresses", "wake_loop"]


class StopPresses:
    """Notices SIGINT when it arrives, also while the main thread is in native code, where Python cannot act on it."""

    _open: ClassVar[WeakSet[StopPresses]] = WeakSet()
    """Those of all sessions: the descriptor is one for the process, and each hands on to the one before."""

    def __init__(self) -> None:
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._before = -1
        self.at_s: float | None = None
        """When Stop was pressed last."""

    def attach(self, stack: ExitStack) -> None:
        """Take the place of the descriptor to which Python writes each signal; whoever had it is still told."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(0)
        self._theirs.settimeout(0)
        stack.callback(self.detach)
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._open.add(self)

    def detach(self) -> None:
        """Put back what was there. Harmless the second time."""
        ours, theirs, self._ours, self._theirs = self._ours, self._theirs, None, None
        if theirs is None or ours is None:
            return
        self._open.discard(self)
        for later in self._open:
            if later._before == theirs.fileno():
                later._before = self._before
        current = signal.set_wakeup_fd(-1)
        wanted = self._before if current == theirs.fileno() else current  # somebody else has come since
        with contextlib.suppress(OSError, ValueError):  # a descriptor that was closed meanwhile
            signal.set_wakeup_fd(wanted)
        ours.close()
        theirs.close()

    def look(self) -> None:
        """Read what has arrived."""
        ours = self._ours
        if ours is None:
            return
        with contextlib.suppress(OSError, ValueError):
            signals = ours.recv(4096)
            if signal.SIGINT in signals:
                self.at_s = time.monotonic()
            if self._before >= 0:
                os.write(self._before, signals)


def wake_loop() -> None:
    """Let the event loop of the main thread, if it runs one, act on a signal: it sleeps until something happens."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for one in frames_above(frame):
        if one.f_code.co_name == "_run_once" and one.f_globals.get("__name__") == "asyncio.base_events":
            loop: Any = names_of(one).get("self")
            with contextlib.suppress(RuntimeError, AttributeError):  # it has been closed, or cannot be looked at just now
                loop.call_soon_threadsafe(int)
            return
