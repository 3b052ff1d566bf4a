"""What the processes of these tests run: the standard library alone, as a process that is spawned imports it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def wait() -> None:
    time.sleep(60)


def is_plain() -> bool:
    """Asked through the agent: what its coming has brought along."""
    return "torch" not in sys.modules


def hold_gil() -> None:
    """In C, without letting another Python thread run."""
    sum(range(10**11))


def raise_error(text: str = "bad label") -> None:
    raise ValueError(text)


def leave(code: int) -> None:
    sys.exit(code)


def leave_at_once(code: int) -> None:
    os._exit(code)


def leave_after_error() -> None:
    try:
        raise_error("the first")
    except ValueError:
        sys.exit(1)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_interrupted() -> None:
    raise KeyboardInterrupt


def start_another() -> None:
    child = multiprocessing.get_context("fork").Process(target=wait, name="grandchild", daemon=False)
    child.start()
    signal.signal(signal.SIGTERM, lambda *_: (child.kill(), child.join(), os._exit(0)))
    child.join()


def fork_again(connection: Any) -> None:
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    connection.send(pid)
    time.sleep(60)


def report(connection: Any) -> None:
    """What this process has of its parent's."""
    handled = {name: signal.getsignal(getattr(signal, name)) is signal.SIG_DFL for name in ("SIGUSR1", "SIGUSR2", "SIGTERM")}
    fd = signal.set_wakeup_fd(-1)
    threads = [thread.name for thread in threading.enumerate()]
    connection.send({"wakeup": fd, "default": handled, "threads": threads})


def square(number: int) -> int:
    return number * number


RUN: dict[str, Callable[..., None]] = {
    "raises": raise_error, "exits": leave, "leaves": leave_at_once, "is killed": be_killed, "is interrupted": be_interrupted,
}  # fmt: skip
