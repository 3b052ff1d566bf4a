"""The processes that tests start: none outlives its test, and each is killed with whatever it has started itself.

A process whose parent has ended becomes a child of the test process (on Linux), so none gets out of sight.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

OF_LIBRARIES = ("resource_tracker", "forkserver", "torch_shm_manager", "compile_worker")
"""What a library starts once and keeps for the life of the process, by a part of its command."""
SET_CHILD_SUBREAPER = 36  # prctl(2)
KILLED_WITHIN_S = 5.0

_lasting: set[int] = set()


def adopt_orphans() -> None:
    """Makes processes whose parent ends children of this one, where the system can do that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)


def outlives_its_test(pid: int) -> None:
    """Says that a fixture of a wider scope ends this process, which a test has started."""
    _lasting.add(pid)


def running_children() -> set[int]:
    """The processes whose parent is this one, and those that `multiprocessing` has had its server fork, without those of libraries."""
    started = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    others = {pid for pid in _children() - started if not any(part in command(pid) for part in OF_LIBRARIES)}
    return {pid for pid in (started | others) - _lasting if _runs(pid)}


def _children() -> set[int]:
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return {child.pid for child in psutil.Process().children()}
    pids = set()
    for numbers in lists:
        with suppress(OSError):  # a thread that has just ended
            pids.update(map(int, numbers.read_text().split()))
    return pids


def kill_left(pids: set[int], *, grace_s: float = 2.0) -> list[str]:
    """What still runs of these after the time to end by itself, in words; it is killed."""
    end = time.monotonic() + grace_s
    while (left := {pid for pid in pids if _runs(pid)}) and time.monotonic() < end:
        time.sleep(0.02)
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    commands = sorted(names.get(pid) or command(pid) for pid in left)
    for pid in left:
        kill(pid)
    return commands


def kill(pid: int) -> None:
    """Kill a process, which may have ended, its descendants, and every process of the sessions that these lead.

    It is left to whoever started them to ask how they ended: `multiprocessing` takes a child that was reaped elsewhere for alive.
    """
    family = {pid}
    end = time.monotonic() + KILLED_WITHIN_S
    while (alive := _family(family)) and time.monotonic() < end:  # again, for what was forked in between
        family |= alive
        for member in alive:
            with suppress(OSError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.01)


def _family(leaders: set[int]) -> set[int]:
    family = set(leaders)
    for leader in leaders:
        with suppress(psutil.NoSuchProcess):
            family |= {child.pid for child in psutil.Process(leader).children(recursive=True)}
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) in family:
                family.add(pid)
    return {pid for pid in family - {os.getpid()} if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
