"""Starts an agent in every process that `multiprocessing` launches, and keeps a list of these processes."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.probing.wrappers import unwrap_all, wrap
from torchdebug_magics.ranks.agent import Agent
from torchdebug_magics.ranks.rank_session import folder_here
from torchdebug_magics.ranks.rank_traces import Child

_FORK_WAIT_S = 0.5


class Children:
    """Open between `attach` and the end of the stack. Processes inherit what is attached here, for their own children."""

    def __init__(self, *, on_error: str = "") -> None:
        self.folder = os.devnull
        """Of the agents; nothing is there until `attach`."""
        self.on_error = on_error
        """See `Agent`."""
        self.started: dict[int, Child] = {}
        self.silent: dict[int, float] = {}
        """Since when a process has not answered."""
        self.dumped: dict[int, list[tuple[str, int, str]]] = {}
        """The stacks of those that do not answer."""
        self.fork_lock = threading.Lock()
        """Held by who looks at this process: a fork in the middle of a look would copy a lock that nobody releases."""
        self._agent: Agent | None = None
        self._owner = 0

    def attach(self, stack: ExitStack) -> None:
        """Make the folder, and give each process that is started from now on an agent."""
        # In a rank, within the folder of its job: a rank that is killed leaves nothing.
        self.folder = os.path.join(folder_here() or _short_folder(), f"tdm{secrets.token_hex(6)}")  # noqa: PTH118 - text, as sockets take it
        self._owner = os.getpid()
        stack.callback(self._remove_folder)  # first, so that an interrupt cannot lose it
        os.mkdir(self.folder, 0o700)  # noqa: PTH102 - the same
        stack.callback(setattr, self, "_agent", None)
        self._agent = Agent(self.folder, self.on_error)
        util.register_after_fork(self, Children._renew_lock)
        wrap(stack, self, BaseProcess, "start", self._start)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        unwrap_all(self)
        self._agent = None
        self._remove_folder()

    def note_ends(self) -> None:
        """See which have ended; to be called again and again."""
        for child in tuple(self.started.values()):
            if child.handle is not None:
                child.exit_code()

    def alive(self) -> list[Child]:
        """Those that still run, in the order in which they were started."""
        return [child for child in tuple(self.started.values()) if child.is_alive()]

    def _renew_lock(self) -> None:
        """Replace the lock in a forked child: its copy may be held by a thread that does not exist there."""
        self.fork_lock = threading.Lock()

    def _remove_folder(self) -> None:
        if os.getpid() == self._owner:  # a fork that leaves the block has the same folder, and not the right to it
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, original: Callable[..., Any], process: BaseProcess) -> Any:
        __tracebackhide__ = True
        method = start_method(process)
        if method != "fork":
            # The agent is pickled first, and begins before the rest, which may fail to arrive.
            process.__dict__ = {"_torchdebug_agent": self._agent, **vars(process)}
        got = False
        try:
            got = self.fork_lock.acquire(timeout=_FORK_WAIT_S)
            return original(process)
        finally:
            if got:
                self.fork_lock.release()
            process.__dict__.pop("_torchdebug_agent", None)
            child = remembered(process, method)
            if child is not None:
                self.started[child.pid] = child


def start_method(process: BaseProcess) -> str:
    """How it is, or will be, started: ``"fork"``, ``"spawn"`` or ``"forkserver"``."""
    import multiprocessing  # noqa: PLC0415 - its contexts are made at import

    return str(getattr(process, "_start_method", None) or multiprocessing.get_start_method())


def remembered(process: BaseProcess, method: str) -> Child | None:
    """A process that was just started; None where that failed."""
    handle = getattr(process, "_popen", None)
    pid = getattr(handle, "pid", None)
    if pid is None:
        return None
    state = process_state(pid)
    return Child(pid, process.name, method, state.started_s if state is not None else 0.0, handle)


def _short_folder() -> str:
    """The path of a socket may have about 100 characters."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < 60 else "/tmp"  # noqa: PLR2004, S108 - the folder itself is private
