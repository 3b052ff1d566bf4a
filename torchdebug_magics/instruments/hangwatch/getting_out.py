"""Ending a cell that does not end by itself, and the processes that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any, ClassVar
from weakref import WeakSet

from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
from torchdebug_magics.instruments.hangwatch.waits.builtin_waits import runs_loop
from torchdebug_magics.machine.guard_interrupt import interrupt_main
from torchdebug_magics.machine.process_state import child_pids, descendants, process_state, read
from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.user_code import frames_above
from torchdebug_magics.ranks.launching import Children

_STOP_S = 1.0
"""For the main thread to act on an interrupt."""
_MOST_INTERRUPTS = 6
_GRACE_S = 2.0
_HELPERS = ("resource_tracker", "forkserver", "compile_worker", "semaphore_tracker")
"""Processes that libraries start once and keep."""


class GettingOut:
    """Helps Stop where the main thread does not act on it; with ``--stop``, presses it."""

    def __init__(self, children: Children, *, stops: bool) -> None:
        self.presses = StopPresses()
        self.has_stopped = False
        self.has_stopped_now = False
        """In the cell that runs now."""
        self.ended_count = 0
        self._children = children
        self._stops = stops
        self._session_before: list[int] = []
        self._before: list[int] = []
        """The processes that ran before the session, and before the cell."""
        self._interrupts = 0

    def attach(self, stack: ExitStack) -> None:
        """Processes that run already are nobody's to end."""
        self._session_before = self._before = child_pids(os.getpid())
        self.presses.attach(stack)

    def between_cells(self) -> None:
        """In a lasting session, what belongs to a cell is over with it."""
        self.presses.at_s, self._interrupts, self.has_stopped_now = None, 0, False
        self._before = child_pids(os.getpid())

    def look(self, progress: Progress, found_s: float, now_s: float) -> None:
        """Interrupt a cell that was found to be stuck at `found_s`, if that was asked for; 0 for one that was not."""
        if self._stops and not self.has_stopped_now and found_s:
            self.has_stopped_now = self.has_stopped = True
            interrupt_main()
            wake_loop()
            self.presses.at_s = now_s
        pressed_s = self.presses.at_s
        if pressed_s is None or now_s - max(pressed_s, progress.rested_s) < _STOP_S or self._interrupts >= _MOST_INTERRUPTS:
            return
        if progress.rested_s > pressed_s and found_s <= pressed_s:
            return  # it has acted on it, and goes on by itself
        self._interrupts += 1
        self.presses.at_s = now_s
        wake_loop()
        if self._interrupts == 1:
            self.ended_count += end_processes(new_processes(self._children, self._before))
        else:
            interrupt_main()

    def end_rest(self) -> int:
        """End what the session has started and still runs; how many were ended in all."""
        self.ended_count += end_processes(new_processes(self._children, self._session_before))
        return self.ended_count


def new_processes(children: Children, before: Collection[int]) -> list[int]:
    """Processes that run and that this one has started since: `before` are those that ran already."""
    ours = [pid for pid in child_pids(os.getpid()) if not any(name in (read(f"/proc/{pid}/cmdline") or "") for name in _HELPERS)]
    return [pid for pid in dict.fromkeys([*(child.pid for child in children.alive()), *ours]) if pid not in before and _runs(pid)]


def end_processes(pids: Iterable[int]) -> int:
    """End them and what they have started: asked first, then made to; how many there were."""
    everybody = [pid for pid in dict.fromkeys(each for pid in pids for each in (*descendants(pid), pid)) if _runs(pid)]
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for pid in filter(_runs, everybody):
            with contextlib.suppress(OSError):
                os.kill(pid, getattr(signal, "SIGCONT", number))  # one that is stopped would not take it
                os.kill(pid, number)
        end_s = time.monotonic() + _GRACE_S
        while any(map(_runs, everybody)) and time.monotonic() < end_s:
            time.sleep(0.02)
    return len(everybody)


def _runs(pid: int) -> bool:
    state = process_state(pid)
    return state is not None and not state.is_zombie


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
        if runs_loop(one):
            loop: Any = names_of(one).get("self")
            with contextlib.suppress(RuntimeError, AttributeError):  # it has been closed, or cannot be looked at just now
                loop.call_soon_threadsafe(int)
            return
