"""Describes a process by a record: its position while it runs, its report at its end, written to a folder."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchdebug_magics.errors import error_line
from torchdebug_magics.machine.process_state import exit_code_of, process_state
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.probing.source.user_code import frames_above, locate, raised_at, user_frame
from torchdebug_magics.ranks.compared import Compared, RankRecord
from torchdebug_magics.ranks.report import Rank, RankState
from torchdebug_magics.report import Report

_LONGEST = 160
"""Characters of an error's text in a row of the table."""
_SAME_START_S = 2.0
"""The clock may be set between two looks."""
_END_S = 2.0
"""A rank that ends as the cell of its launcher does may still be writing its report."""


def standing_here(rank: int, elapsed_s: float, *, is_in_job: bool, live: object = None) -> RankRecord:
    """Return where this process stands, which remains if it is killed; any thread may call it."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    position = hash(tuple((id(frame.f_code), frame.f_lasti) for frame in frames_above(innermost)))
    frame = user_frame(innermost)
    own = Rank(**_this_process(rank, elapsed_s), location=None if frame is None else locate(frame))
    return RankRecord(rank=own, is_in_job=is_in_job, position=position, live=live)


def record_of(compared: Compared, rank: int, report: Report, error: BaseException | None, elapsed_s: float) -> RankRecord:
    """Make the record of this process at its end."""
    state: RankState = "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"
    line, longest = error_line(error), _LONGEST + len(f"{type(error).__name__}: ")
    own = Rank(
        **_this_process(rank, elapsed_s), state=state, exit_code=None if error is None else 1, report=report,
        error=line if len(line) <= longest else f"{line[: longest - 1]}…", location=raised_at(error),
    )  # fmt: skip
    return RankRecord(rank=own, compared=compared)


def _this_process(rank: int, elapsed_s: float) -> dict[str, Any]:
    return {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "device": this_rank.device(), "elapsed_s": elapsed_s}


def left(folder: str) -> dict[int, RankRecord]:
    """Read what each process of a job has written last, by process id."""
    records: dict[int, RankRecord] = {}
    for file in Path(folder).glob("*.record"):
        with contextlib.suppress(Exception):  # written by a version that was reloaded meanwhile, or taken away
            records[int(file.stem)] = pickle.loads(file.read_bytes())  # noqa: S301 - our own, in a private folder
    return records


def leave_whole(path: Path, data: bytes) -> None:
    """Whole or not at all, whenever the process is killed."""
    new = path.with_name(f"{path.name}~")
    new.write_bytes(data)
    new.replace(path)


def collected(folder: str, launched: Sequence[Child], *, is_hurried: bool) -> list[RankRecord]:
    """One record a process; `is_hurried`: the user has pressed Stop, and nobody is waited for."""
    children = {child.pid: child for child in launched}
    records = left(folder)
    end_s = time.monotonic() + (0 if is_hurried else _END_S)
    while time.monotonic() < end_s:
        running = [child.pid for child in launched if child.exit_code() is None]
        if all(pid not in records or records[pid].rank.report is not None for pid in running):
            break
        time.sleep(0.02)
        records = left(folder)
    ended = [_ended(pid, children.get(pid), records.get(pid), number) for number, pid in enumerate({**children, **records})]
    if len({record.rank.rank for record in ended}) == len(ended):
        return ended
    # Two with the same number, as in two launches: they are numbered by their start order.
    return [record.with_rank(rank=number) for number, record in enumerate(ended)]


def _ended(pid: int, launched: Child | None, record: RankRecord | None, number: int) -> RankRecord:
    """The record of a process as it ended, from its last known position where it left no report."""
    code = None if launched is None else launched.exit_code()
    if record is not None and record.rank.report is not None:
        return record if code is None else record.with_rank(exit_code=code)
    error = launched.cannot_arrive if launched is not None and record is None and code else ""
    state: RankState = "interrupted" if code is None else "finished" if code == 0 else "died"
    unseen = Rank(rank=number, host=socket.gethostname(), pid=pid, device="cpu", elapsed_s=0.0)
    return (record or RankRecord(rank=unseen, is_in_job=False)).with_rank(state=state, exit_code=code, error=error)


@dataclass(eq=False)
class Child:
    """A process that was started while `Children` was open."""

    pid: int
    name: str
    method: str
    """How it was started: ``"fork"``, ``"spawn"`` or ``"forkserver"``."""
    started_s: float
    """When: a number that is used again belongs to another process."""
    handle: Any = field(repr=False)
    """The `Popen` object of `multiprocessing`, kept until the process has ended, because a pool drops its workers early."""
    seen_exit_code: int | None = None
    cannot_arrive: str = ""
    """Why its function cannot be imported in it, or nothing."""

    def exit_code(self) -> int | None:
        """The exit code as in `multiprocessing`, negative for a signal; None while it runs or if unknown. The process is not reaped."""
        if self.seen_exit_code is None:
            code = getattr(self.handle, "returncode", None)
            code = exit_code_of(self.pid) if code is None else code
            self.seen_exit_code = code
            self.handle = self.handle if code is None else None
        return self.seen_exit_code

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        state = process_state(self.pid)
        if state is None or (self.started_s and abs(state.started_s - self.started_s) > _SAME_START_S):
            return False
        # A process whose other threads have not ended yet is a zombie without an exit code.
        return not state.is_zombie or (self.method != "forkserver" and self.exit_code() is None)
