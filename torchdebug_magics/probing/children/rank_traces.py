"""Describes a process: its position while it runs and a record at its end, both written to a folder."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.probing import this_rank
from torchdebug_magics.probing.where import frames_above, is_user_code, locate, location, user_frame
from torchdebug_magics.ranks.compared import RankRecord
from torchdebug_magics.ranks.report import Rank

if TYPE_CHECKING:
    from torchdebug_magics.ranks.report import RankState
    from torchdebug_magics.report import Location, Report

__all__ = ["Left", "Standing", "leave_whole", "left", "record_of", "standing_here"]

_LONGEST = 160
"""Characters of an error's text in a row of the table."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The position of a rank, which remains if the rank is killed."""

    rank: int
    pid: int
    host: str = field(default_factory=socket.gethostname)
    device: str
    location: Location | None
    elapsed_s: float
    is_in_job: bool = False
    position: int = 0
    """Another one whenever its main thread has gone on, in whatever code."""
    live: object = field(default=None, compare=False)
    """The snapshot for the live view."""


@dataclass(frozen=True)
class Left:
    """The files of one process, read."""

    standing: Standing | None = None
    record: RankRecord | None = None
    problems: tuple[str, ...] = ()
    """Failures of this package in that process."""


def standing_here(rank: int, elapsed_s: float, *, is_in_job: bool, live: object = None) -> Standing:
    """Return the position of this process; any thread may call it."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    position = hash(tuple((id(one.f_code), one.f_lasti) for one in frames_above(innermost)))
    frame = user_frame(innermost)
    return Standing(
        rank=rank, pid=os.getpid(), device=this_rank.device(), location=None if frame is None else locate(frame), elapsed_s=elapsed_s,
        is_in_job=is_in_job, position=position, live=live,
    )  # fmt: skip


def record_of(instrument: str, rank: int, report: Report, error: BaseException | None, elapsed_s: float) -> RankRecord:
    """Make the record of this process."""
    from torchdebug_magics import catalog  # noqa: PLC0415 - a row names its probe: each would import the other

    compared = catalog.instrument(instrument).compared(report)
    own = Rank(
        rank=rank, host=socket.gethostname(), pid=os.getpid(), device=this_rank.device(), state=_state(error),
        exit_code=None if error is None else 1, report=report, elapsed_s=elapsed_s, error=_text(error), location=_place(error),
    )  # fmt: skip
    return RankRecord(rank=own, compared=compared)


def left(folder: str) -> dict[int, Left]:
    """Read what each process of a job has written so far, by process id."""
    found: dict[int, Left] = {}
    with contextlib.suppress(OSError):
        for file in Path(folder).iterdir():
            pid, _, kind = file.name.partition(".")
            with contextlib.suppress(Exception):  # written by a version that was reloaded meanwhile, or taken away
                if kind in {"standing", "record", "problems"}:
                    value = pickle.loads(file.read_bytes())  # noqa: S301 - our own, in a private folder
                    found[int(pid)] = replace(found.get(int(pid), Left()), **{kind: value})
    return found


def leave_whole(path: Path, data: bytes) -> None:
    """Whole or not at all, whenever the process is killed."""
    new = path.with_name(f"{path.name}~")
    new.write_bytes(data)
    new.replace(path)


def _state(error: BaseException | None) -> RankState:
    return "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    text = next(iter(str(error).strip().splitlines()), "")
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException | None) -> Location | None:
    if error is None:
        return None
    walked = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return location(walked[-1][0].co_filename, walked[-1][1], walked[-1][0].co_name) if walked else None
