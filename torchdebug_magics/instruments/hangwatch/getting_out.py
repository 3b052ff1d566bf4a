"""Ending a cell that does not end by itself, and the processes that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.stop_presses import StopPresses, wake_loop
from torchdebug_magics.machine.files import read
from torchdebug_magics.machine.interrupts import interrupt_main
from torchdebug_magics.machine.process_state import child_pids, process_state

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
    from torchdebug_magics.probing.children.launching import Children

__all__ = ["GettingOut", "end_processes", "new_processes"]

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

    @property
    def was_pressed(self) -> bool:
        """Whether Stop was pressed, though another error may have come of it."""
        return self.presses.at_s is not None

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


def new_processes(children: Children, before: Iterable[int]) -> list[int]:
    """Processes that run and that this one has started since: `before` are those that ran already."""
    found = dict.fromkeys(child.pid for child in children.alive())
    found.update(dict.fromkeys(pid for pid in child_pids(os.getpid()) if not _is_helper(pid)))
    return [pid for pid in found if pid not in set(before) and _runs(pid)]


def end_processes(pids: Iterable[int]) -> int:
    """End them and what they have started: asked first, then made to; how many there were."""
    everybody = [pid for pid in dict.fromkeys(each for pid in pids for each in _with_descendants(pid)) if _runs(pid)]
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        for pid in filter(_runs, everybody):
            with contextlib.suppress(OSError):
                os.kill(pid, getattr(signal, "SIGCONT", number))  # one that is stopped would not take it
                os.kill(pid, number)
        end_s = time.monotonic() + _GRACE_S
        while any(map(_runs, everybody)) and time.monotonic() < end_s:
            time.sleep(0.02)
    return len(everybody)


def _with_descendants(pid: int) -> list[int]:
    return [*(each for child in child_pids(pid) for each in _with_descendants(child)), pid]


def _runs(pid: int) -> bool:
    state = process_state(pid)
    return state is not None and not state.is_zombie


def _is_helper(pid: int) -> bool:
    command = read(f"/proc/{pid}/cmdline") or ""
    return any(name in command for name in _HELPERS)
