"""What the system says of one process: whether it runs, waits or has ended, and how long it has computed."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass

_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 35: "sleep", 42: "connect", 45: "receive", 47: "receive", 61: "wait",
        9: "file", 16: "device", 17: "file", 26: "file", 44: "send", 46: "send", 73: "file lock", 74: "file", 75: "file", 202: "futex",
        257: "file", 275: "file", 230: "sleep", 232: "poll", 247: "wait", 270: "select", 271: "poll", 281: "poll", 288: "accept",
    },
    "aarch64": {
        22: "poll", 63: "read", 64: "write", 72: "select", 73: "poll", 95: "wait", 98: "futex", 101: "sleep", 115: "sleep",
        29: "device", 32: "file lock", 56: "file", 67: "file", 76: "file", 82: "file", 83: "file", 206: "send", 211: "send",
        202: "accept", 203: "connect", 207: "receive", 212: "receive", 260: "wait",
    },
}  # fmt: skip
"""Calls in which a process sleeps, by their numbers."""


@dataclass(frozen=True)
class ProcessState:
    """One look at a process."""

    pid: int
    parent: int
    name: str
    status: str
    """As psutil names it: ``"running"``, ``"sleeping"``, ``"stopped"``, ``"zombie"``."""
    cpu_s: float
    started_s: float
    """Since the epoch."""

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended."""
        return self.status in {"zombie", "dead"}


def has_proc() -> bool:
    """Whether this system tells of other processes under ``/proc``."""
    return os.path.exists("/proc/self/stat")  # noqa: PTH110 - asked often


def age_s() -> float:
    """For how long this process runs."""
    state = process_state(os.getpid())
    return 0.0 if state is None else max(0.0, time.time() - state.started_s)


def process_state(pid: int) -> ProcessState | None:
    """None where there is no such process, or it is not ours to look at."""
    import psutil  # noqa: PLC0415 - not for who only loads the extension

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessState(pid, process.ppid(), process.name(), process.status(), times.user + times.system, process.create_time())
    except psutil.Error:
        return None


def exit_code_of(pid: int) -> int | None:
    """Of a child of this process that has ended, negative for a signal; whoever waits for it can still do so. None for any other."""
    if not hasattr(os, "waitid"):
        return None
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def thread_cpu_s(pid: int, thread: int | None) -> float | None:
    """What one thread, by its number in the system, has computed; None where it is not known."""
    text = None if thread is None else read(f"/proc/{pid}/task/{thread}/stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_for_core_s(pid: int, thread: int | None) -> float:
    """How long a thread was ready to run and had no core, since it began; 0.0 where that is not known."""
    words = (read(f"/proc/{pid}/task/{thread or pid}/schedstat") or "").split()
    return int(words[1]) / 1e9 if len(words) > 1 else 0.0


def main_thread_ran_s() -> float:
    """How long the main thread of this process has run, or waited for a core, since it began."""
    words = (read(f"/proc/self/task/{os.getpid()}/schedstat") or "").split()
    return (int(words[0]) + int(words[1])) / 1e9 if len(words) > 1 else time.process_time()


def waits_in(pid: int, thread: int | None = None) -> str:
    """The system call that a thread sleeps in, and the pipe or socket of it: ``"write pipe:[123]"``, ``"futex"``; empty where it runs."""
    words = (read(f"/proc/{pid}/task/{thread or pid}/syscall") or "").split()
    if words[:1] == ["-1"]:
        return "memory"  # it waits for a page, such as that of a mapped file
    if not words or not words[0].isdigit():  # "running", or not for us to see
        return ""
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]), "")
    if name not in {"read", "write"}:
        return name
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")  # noqa: PTH115 - it is no path
    except (OSError, ValueError):
        target = ""
    return f"{name} {target}".rstrip()


def child_pids(pid: int) -> list[int]:
    """The processes that this one has started, and not waited for; of every thread."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - psutil would look at every process of the machine, four times a second
    except OSError:
        import psutil  # noqa: PLC0415 - only where the system has no /proc

        with contextlib.suppress(psutil.Error):
            return sorted(child.pid for child in psutil.Process(pid).children())
        return []
    threads.sort(key=str(pid).__eq__)  # the main thread last: it takes over the children of a thread that ends meanwhile
    return sorted({int(child) for thread in threads for child in (read(f"/proc/{pid}/task/{thread}/children") or "").split()})


def descendants(pid: int) -> list[int]:
    """The children of a process, with theirs before each."""
    return [each for child in child_pids(pid) for each in (*descendants(child), child)]


def open_pipes(pid: int, *, for_writing: bool = False) -> frozenset[str]:
    """The pipes that a process holds open, such as ``pipe:[123]``; all, or those to which it could write."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names are all that is needed
            flags = (read(f"/proc/{pid}/fdinfo/{name}") or "").partition("flags:")[2].split() if for_writing else ()
            if flags and not int(flags[0], 8) & (os.O_WRONLY | os.O_RDWR):
                continue
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115 - it is no path
    return frozenset(one for one in found if one.startswith("pipe:"))


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal itself: any other would end it."""
    lines = (read(f"/proc/{pid}/status") or "").splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def read(path: str, size: int = 1 << 20) -> str | None:
    """The text of a small file, or its first `size` bytes: a fifth of what `Path.read_text` costs, as gauges read many of them often."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(file, size).decode().strip()
    except OSError:
        return None
    finally:
        os.close(file)
