"""Answers questions from inside a child process; the standard library alone, as the child may have imported nothing else."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

AGENT_THREAD = "torchdebug-agent"
_WAITING = 8
"""Questions that may wait for their turn."""
_MOST_FRAMES = 50


class Agent:
    """The agent of one process. A copy that reaches a child, by fork or by pickle, starts there by itself."""

    def __init__(self, folder: str, on_error: str = "") -> None:
        self.folder = folder
        """Private to the user: a socket, and after an error a record, for each process."""
        self.on_error = on_error
        """``module:function`` from the exception that ends the process to what is recorded beside it."""
        self._pid = 0
        """The process in which the agent has started."""
        self._inherited: list[BaseException | None] = []
        """Exceptions that are the parent's."""
        self._last: util.Finalize | None = None
        util.register_after_fork(self, Agent.begin)  # held weakly

    def __reduce__(self) -> tuple[Callable[..., Agent], tuple[str, str]]:
        return _arrive, (self.folder, self.on_error)

    def begin(self) -> None:
        """Open the socket of this process and answer from a thread; a failure leaves the process as it would be without."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._inherited = [sys.exc_info()[1], getattr(sys, "last_value", None)]
            with contextlib.suppress(OSError, RuntimeError, AttributeError):  # no room for a file or a thread, or no such sockets here
                self._open()
        if self._last is None or not self._last.still_active():  # `multiprocessing` forgets what was registered before a process runs
            self._last = util.Finalize(None, self._record_error, exitpriority=1000)

    def _open(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)  # a fork inherits the parent's, which would take this process's signals for its own
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(socket_path(self.folder, os.getpid()))
        listening.listen(_WAITING)
        threading.Thread(target=self._answer_all, args=(listening,), name=AGENT_THREAD, daemon=True).start()
        self._register_dump()

    def _answer_all(self, listening: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                connection.settimeout(5.0)
                connection.sendall(_answer(b"".join(iter(partial(connection.recv, 1 << 16), b""))))

    def _register_dump(self) -> None:
        """Let a signal write the stacks to a file, for when no Python thread gets a turn; only one that nobody handles."""
        number = dump_signal()
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            file = Path(self.folder, f"{os.getpid()}.stack").open("ab", buffering=0)  # noqa: SIM115 - for the life of the process
            faulthandler.register(number, file=file, all_threads=False)  # the frames of a thread that runs may not be read
            if not faulthandler.is_enabled():
                faulthandler.enable(file=file)

    def _record_error(self) -> None:
        """Called while the process ends: write down the exception that ends it, if one does."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and error.code:  # torch's launcher turns an error into an exit code
            error = error.__context__
        if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)) or any(error is one for one in self._inherited):
            return
        record = record_of_error(error)
        with contextlib.suppress(Exception):  # what is recorded beside it is a courtesy
            record.update(_named(self.on_error)(error) if self.on_error else {})
        with contextlib.suppress(OSError):
            Path(self.folder, f"{os.getpid()}.error").write_text(json.dumps(record), encoding="utf-8")


def record_of_error(error: BaseException) -> dict[str, Any]:
    """Plain data: type, message, time, and (file, line, function) of each call, the outermost first."""
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    return {"type": type(error).__name__, "message": str(error)[:2000], "at_s": time.time(), "frames": frames[-_MOST_FRAMES:]}


def _arrive(folder: str, on_error: str) -> Agent:
    """Unpickle and start an agent in a spawned process, where no after-fork hook runs."""
    agent = Agent(folder, on_error)
    agent.begin()
    return agent


def socket_path(folder: str, pid: int) -> str:
    """The path of the socket on which the agent of a process listens."""
    return os.path.join(folder, f"{pid}.socket")  # noqa: PTH118 - text, as sockets take it


def dump_signal() -> int | None:
    """A real-time signal that neither Python nor PyTorch uses; None where there are none."""
    last: int | None = getattr(signal, "SIGRTMAX", None)
    return None if last is None else int(last) - 3


def _answer(question: bytes) -> bytes:
    """The question names a function: ``{"call": "module:function", "with": {...}}``."""
    try:
        asked = json.loads(question)
        return json.dumps({"answer": _named(asked["call"])(**asked["with"])}).encode()
    except Exception as error:  # noqa: BLE001 - told to who asked; the process goes on
        return json.dumps({"failure": f"{type(error).__name__}: {error}"}).encode()


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
