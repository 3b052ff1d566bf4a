"""Follows the processes that `multiprocessing` starts: with an agent in each, or under the instrument of the session that launches them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.probing.wrappers import unwrap_all, wrap
from torchdebug_magics.ranks.agent import Agent
from torchdebug_magics.ranks.compared import Compared, Job, RankRecord
from torchdebug_magics.ranks.merging import held_details, merged
from torchdebug_magics.ranks.rank_session import ATTRIBUTE, RankSession, folder_here
from torchdebug_magics.ranks.rank_traces import Child, collected, left
from torchdebug_magics.report import Report

_FORK_WAIT_S = 0.5
_HELPERS = frozenset({
    ("torch.utils.data._utils.worker", "_worker_loop"), ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
    ("multiprocessing.pool", "worker"), ("concurrent.futures.process", "_process_worker"), ("multiprocessing.managers", "_run_server"),
})  # fmt: skip
"""Targets of helper processes, which do not train."""


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


class _Row(Protocol):
    """The instrument, which imports this module."""

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    def compared(self, report: Any) -> Compared:
        """The part of a report that is compared with other ranks."""


class FollowedRanks:
    """A probe around the instrument's own, which watches the process that launches the ranks."""

    def __init__(self, inner: Any, row: _Row, options: Mapping[str, Any], job: Job | None = None) -> None:
        self._inner = inner
        self._row = row
        self._options = options
        self._is_rank = job is not None
        """Then what it launches belongs to the job of its own launcher, who puts all together."""
        self._job = job
        self._launched: list[Child] = []
        self._records: list[RankRecord] = []
        self._owner = os.getpid()

    def attach(self, stack: ExitStack) -> None:
        """Attach the inner probe, and follow every process that `multiprocessing` starts."""
        self._owner = os.getpid()
        self._inner.attach(stack)
        wrap(stack, self, BaseProcess, "start", self._start)
        stack.push(self._ended)

    def sweep(self) -> None:
        """Sweep the inner probe, unwrap `start` and remove the folder, which was read when the session ended."""
        self._forget()
        self._remove_folder()

    def report(self) -> Report:
        """The inner probe's, or the ranks' where there were any."""
        own: Report = self._inner.report()
        if not any(record.compared.worked or record.rank.state != "finished" or record.problems for record in self._records):
            return own
        compared = self._row.compared(own)
        if compared.worked and not any(record.is_in_job or record.compared.found_at for record in self._records):
            return own  # what it launched helped it, and did nothing wrong
        return merged(
            self._row.name, self._records, held_details(self._records), own if compared.found_at is not None else None, own.problems
        )

    def live(self) -> object | None:
        """The live snapshot of the lowest running rank, else of the launcher; a launcher that judges its ranks joins the two."""
        own: object | None = self._inner.live()
        if self._job is None or self._is_rank:
            return own
        seen = [record for record in left(self._job.folder).values() if record.live is not None]
        if not seen:
            return own
        lowest = min(seen, key=lambda record: record.rank.rank).live
        judge = getattr(self._inner, "live_of_ranks", None)
        return lowest if judge is None else judge(own, lowest)

    def __getattr__(self, name: str) -> Any:
        """What else the inner probe has: `kept`, and, of some, `traceback_of` and `standing`."""
        if name == "_inner":  # it is not there yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _start(self, original: Callable[[BaseProcess], None], process: BaseProcess) -> None:
        __tracebackhide__ = True
        target = vars(process).get("_target")
        if os.getpid() != self._owner or (getattr(target, "__module__", ""), getattr(target, "__name__", "")) in _HELPERS:
            return original(process)
        with contextlib.suppress(OSError):  # no room for a folder: then nothing is followed
            self._job = self._job or self._new_job()
        if self._job is None:
            return original(process)
        method, outer = start_method(process), vars(process).get(ATTRIBUTE)
        cannot_arrive = _cannot_arrive(process, method)  # its function is forgotten when it has started
        # The last that is pickled: it begins when all that the target imports is there. With two magics, each has one.
        vars(process)[ATTRIBUTE] = RankSession(self._job, len(self._launched), self._forget, outer)
        try:
            return original(process)
        finally:
            if os.getpid() == self._owner:
                vars(process).pop(ATTRIBUTE, None)
                if (child := remembered(process, method)) is not None:
                    child.cannot_arrive = cannot_arrive
                    self._launched.append(child)

    def _new_job(self) -> Job:
        folder = os.path.join(tempfile.gettempdir(), f"tdm{secrets.token_hex(6)}")  # noqa: PTH118 - as the other folders for children
        os.mkdir(folder, 0o700)  # noqa: PTH102 - the same
        ask = getattr(self._inner, "options_in_rank", None)
        options = self._options if ask is None else ask()
        return Job(folder=folder, module=self._row.module, options=dict(options), launcher=os.getpid())

    def _ended(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._job is not None and not self._is_rank and os.getpid() == self._owner:
            self._records = collected(self._job.folder, self._launched, is_hurried=isinstance(error, KeyboardInterrupt))

    def _forget(self) -> None:
        """Remove the launcher's session, also from a fork that has inherited it."""
        unwrap_all(self)
        self._inner.sweep()

    def _remove_folder(self) -> None:
        if self._job is not None and not self._is_rank and os.getpid() == self._owner:
            gone = f"{self._job.folder}~"
            with contextlib.suppress(OSError):  # a rank that goes on finds nowhere to write, also in the middle of this
                os.rename(self._job.folder, gone)  # noqa: PTH104 - text, as above
            shutil.rmtree(gone, ignore_errors=True)


def _cannot_arrive(process: BaseProcess, method: str) -> str:
    """Why a function of a notebook reaches no process but a fork; empty where it can be imported."""
    if method == "fork":
        return ""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    values = (vars(process).get("_target"), *vars(process).get("_args", ()))
    codes = [value.__code__ for value in values if getattr(value, "__module__", "") == "__main__" and hasattr(value, "__code__")]
    name = next((code.co_name for code in codes if code.co_filename != file), "")
    if not name:
        return ""
    return (
        f"a process that {method!r} starts cannot import `{name}` from the notebook: use start_method='fork', or put `{name}` into a file"
    )
