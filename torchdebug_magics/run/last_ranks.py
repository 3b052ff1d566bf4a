"""Collects the records of all ranks on rank 0: it waits for ranks that make progress, and not for one that is dead or stands still."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchdebug_magics.probing.children.rank_records import without_report
from torchdebug_magics.probing.children.rank_traces import Standing

if TYPE_CHECKING:
    from torchdebug_magics.ranks.compared import RankRecord
    from torchdebug_magics.run.meeting import Meeting

__all__ = ["collected", "sign_every_s"]

_LOOK_S = 0.1
_SILENT_S = 5.0
"""No sign of life, as after a SIGKILL."""
_STILL_S = 10.0
"""Alive, and at the same instruction, as in a collective that nobody else enters."""
_HURRIED_S, _MOST_HURRIED_S = 3.0, 10.0
"""The same, and in all, where rank 0 itself has failed: its launcher ends the others only when it has ended."""


def sign_every_s(ranks_count: int) -> float:
    """Seconds between two signs of life of a rank: the launcher's store takes a few thousand a second from all ranks together."""
    return 0.5 * max(1.0, ranks_count / 1000)


def collected(meeting: Meeting, own: RankRecord, *, is_hurried: bool) -> list[RankRecord]:
    """Return a record of every rank, including ranks that left none."""
    records = {own.rank.rank: own}
    others = {rank: _Other(rank, meeting.ranks_count) for rank in range(meeting.ranks_count) if rank not in records}
    end_s = time.monotonic() + _MOST_HURRIED_S
    patience_s = _HURRIED_S if is_hurried else _STILL_S
    while others:
        for rank in tuple(others):
            record = meeting.record_of(rank)
            if record is None:
                others[rank].look(meeting.standing_of(rank))
            else:
                records[rank] = record
                del others[rank]
        if all(one.has_stopped(patience_s) for one in others.values()) or (is_hurried and time.monotonic() > end_s):
            break
        time.sleep(_LOOK_S)
    return [*records.values(), *(without_report(one.standing, "died" if one.is_silent else "interrupted") for one in others.values())]


class _Other:
    """Follows a rank that has left no record so far."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.standing = Standing(rank=rank, pid=0, host="", device="", location=None, elapsed_s=0.0, is_in_job=True)
        self._silent_s = max(_SILENT_S, 6 * sign_every_s(ranks_count))
        self._alive_s = self._moved_s = time.monotonic()
        self._is_heard = False

    def look(self, standing: Standing | None) -> None:
        """Take in the latest sign of life."""
        if standing is None or standing == self.standing:
            return
        if self.standing.pid:  # what was there at the first look may be of a rank that is dead
            self._is_heard, self._alive_s = True, time.monotonic()
            self._moved_s = self._alive_s if standing.position != self.standing.position else self._moved_s
        self.standing = standing

    @property
    def is_silent(self) -> bool:
        """Whether its last sign of life is too old."""
        return not self._is_heard or time.monotonic() - self._alive_s > self._silent_s

    def has_stopped(self, patience_s: float) -> bool:
        """Whether it has stopped, and will probably leave no record."""
        now_s = time.monotonic()
        return now_s - self._alive_s > min(patience_s, self._silent_s) or now_s - self._moved_s > patience_s
