"""The session of one rank: opened where a launched process begins, closed where it ends, its report left in a file."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import current_process, util
from pathlib import Path
from typing import Any

from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing.after_import import AfterImport
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.ranks.compared import Job, RankRecord
from torchdebug_magics.ranks.rank_traces import leave_whole, record_of, standing_here
from torchdebug_magics.session import Session

ATTRIBUTE = "_torchdebug_rank"
"""The attribute of a `multiprocessing` process that holds its `RankSession`."""
_EVERY_S = 0.25
_LET_GO_S = 0.02


class RankSession:
    """Held by the process object that is about to start. It begins in the new process by itself, whatever way that is started."""

    def __init__(self, job: Job, index: int, inherited: Callable[[], None], outer: RankSession | None = None) -> None:
        self.job = job
        self._outer = outer
        """The session of an enclosing magic."""
        self.index = index
        """The number of this process in launch order: its rank, unless torch knows better."""
        self._inherited = inherited
        """Removes the launcher's session from a fork."""
        self._session: Session[Any] | None = None
        self._began_s = 0.0
        self._last: util.Finalize | None = None
        self._stack = ExitStack()
        self._guard = Guard()
        self._rank: int | None = None
        self._world_size = 1
        self._pid = 0
        """The process that was spawned for this session."""
        util.register_after_fork(self, RankSession.begin)  # held weakly; called in every process, also a spawned one

    def __reduce__(self) -> tuple[Callable[..., RankSession], tuple[object, ...]]:
        return _arrived, (self.job, self.index, self._outer)

    def begin(self) -> None:
        """Open the session in the process that this belongs to, once; a failure leaves it as it would be without."""
        if os.getpid() == self.job.launcher or not (self._pid == os.getpid() or self._is_of(vars(current_process()).get(ATTRIBUTE))):
            return
        if not self._began_s:
            self._began_s = time.monotonic()
            self._guard.run("leaving the launcher's session", self._inherited)
            self._stack.enter_context(
                AfterImport("torch", partial(self._guard.run, "opening the session of a rank", self._open))
            )  # it is not ours to import it
        if self._last is None or not self._last.still_active():  # a fork server forgets what was registered before a process runs
            self._last = util.Finalize(None, self.end, exitpriority=1000)  # before those that end its threads and pools

    def _is_of(self, rank: RankSession | None) -> bool:
        """Whether it is the session of this process, or around that."""
        return rank is not None and (rank is self or self._is_of(rank._outer))

    def _open(self) -> None:
        from torchdebug_magics.probing.wrappers import wrap  # noqa: PLC0415 - it imports torch, which is not ours to import before

        session = self._row().session_of_cell(self.job.options, job=self.job)
        session.__enter__()
        self._session = session
        torch: Any = sys.modules["torch"]
        if torch.distributed.is_available():
            for holder in (torch.distributed, torch.distributed.distributed_c10d):
                wrap(self._stack, self, holder, "destroy_process_group", self._leave_group)
        look = partial(self._guard.run, "the look at a rank", self._stand)
        self._stack.enter_context(Sampler(look, name="rank", every_s=_EVERY_S, first_s=0.05))

    def _row(self) -> Any:
        """The instrument, by name: each would import the other."""
        return importlib.import_module(self.job.module).INSTRUMENT

    def _leave_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The group's destructor waits, and holds the GIL, for a thread that needs it to let go of what a collective held of Python's."""
        __tracebackhide__ = True
        self.number()
        time.sleep(_LET_GO_S)
        original(*args, **kwargs)

    def end(self) -> None:
        """Called while the process ends: close the session, and leave what it found."""
        error = _ending_error()
        session, self._session = self._session, None
        self._guard.run("the last look at a rank", self._stack.close)
        record = None
        with _not_ended_meanwhile():
            if session is not None:
                trace = None if error is None else error.__traceback__
                self._guard.run("closing the session of a rank", session.__exit__, None if error is None else type(error), error, trace)
                record = self._guard.run("the report of a rank", self._record, session, error)
            if record is None and self._guard.problems:
                record = self._standing(None)
            if record is not None:
                self._leave(replace(record, problems=tuple(self._guard.problems)))

    def number(self) -> int:
        """The rank according to torch or its launcher, else the number in launch order."""
        known = this_rank.rank()
        self._rank = self._rank if known is None else known  # it may leave its group before its end
        self._world_size = max(self._world_size, this_rank.world_size())
        return self.index if self._rank is None else self._rank

    def _stand(self) -> None:
        session = self._session
        standing = None if session is None else self._standing(session.live())
        if standing is not None and self._session is session:  # else it has ended meanwhile
            self._leave(standing)

    def _standing(self, live: object) -> RankRecord:
        return standing_here(self.number(), time.monotonic() - self._began_s, is_in_job=self._world_size > 1, live=live)

    def _leave(self, record: RankRecord) -> None:
        with contextlib.suppress(OSError):
            leave_whole(Path(self.job.folder, f"{os.getpid()}.record"), pickle.dumps(record))

    def _record(self, session: Session[Any], error: BaseException | None) -> RankRecord:
        compared = self._row().compared(session.report)
        record = record_of(compared, self.number(), session.report, error, time.monotonic() - self._began_s)
        return replace(record, is_in_job=self._world_size > 1)


def folder_here() -> str:
    """The folder of this process's job, removed when the launcher's session ends; empty if no session launched this process."""
    session: RankSession | None = vars(current_process()).get(ATTRIBUTE)
    return "" if session is None or os.getpid() == session.job.launcher else session.job.folder


def _arrived(job: Job, index: int, outer: RankSession | None) -> RankSession:
    """Unpickle and begin in a spawned process, where no after-fork hook runs, after everything else has been unpickled."""
    rank = RankSession(job, index, lambda: None, outer)  # a spawned process inherits no session
    rank._pid = os.getpid()
    rank.begin()
    return rank


@contextmanager
def _not_ended_meanwhile() -> Iterator[None]:
    """A launcher ends the others as soon as one rank has failed; this one is ending by itself, and only writes its report first."""
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ending_error() -> BaseException | None:
    """The exception that ends the process; torch's launcher turns one into an exit code."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        if error.code in {0, None}:
            return None
        return error.__context__ or error
    return error
