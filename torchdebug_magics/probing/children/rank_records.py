"""Reads what the ranks of a job have left, and says of each how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchdebug_magics.probing.children.rank_traces import Left, Standing, left
from torchdebug_magics.ranks.compared import Compared, RankRecord
from torchdebug_magics.ranks.report import Rank

if TYPE_CHECKING:
    from torchdebug_magics.probing.children.launching import Child
    from torchdebug_magics.ranks.report import RankState

__all__ = ["Launched", "collected", "without_report"]

_END_S = 2.0
"""A rank that ends as the cell of its launcher does may still be writing its report."""


@dataclass(frozen=True, eq=False)
class Launched:
    """A process that the session has seen start."""

    child: Child
    cannot_arrive: str
    """Why its function cannot be imported in it, or nothing."""


def collected(folder: str, launched: Sequence[Launched], *, is_hurried: bool) -> list[RankRecord]:
    """One record a process; `is_hurried`: the user has pressed Stop, and nobody is waited for."""
    children = {one.child.pid: one for one in launched}
    found = left(folder)
    end_s = time.monotonic() + (0 if is_hurried else _END_S)
    while any(_is_ending(one.child, found) for one in launched) and time.monotonic() < end_s:
        time.sleep(0.02)
        found = left(folder)
    records = [_record(pid, children.get(pid), found.get(pid, Left()), number) for number, pid in enumerate({**children, **found})]
    return _numbered(records)


def _is_ending(child: Child, found: Mapping[int, Left]) -> bool:
    return child.exit_code() is None and child.pid in found and found[child.pid].record is None


def _record(pid: int, launched: Launched | None, found: Left, number: int) -> RankRecord:
    code = None if launched is None else launched.child.exit_code()
    if found.record is not None:
        rank = found.record.rank if code is None else replace(found.record.rank, exit_code=code)
        return replace(found.record, rank=rank, problems=found.problems)
    standing = found.standing or Standing(rank=number, pid=pid, device="cpu", location=None, elapsed_s=0.0)
    error = launched.cannot_arrive if launched is not None and found.standing is None and code else ""
    return replace(without_report(standing, _state(code), code, error), problems=found.problems)


def without_report(standing: Standing, state: RankState, exit_code: int | None = None, error: str = "") -> RankRecord:
    """Make a record for a rank that left no report, from its last known position."""
    own = Rank(
        rank=standing.rank, host=standing.host, pid=standing.pid, device=standing.device, state=state, exit_code=exit_code, report=None,
        elapsed_s=standing.elapsed_s, error=error, location=standing.location,
    )  # fmt: skip
    return RankRecord(rank=own, compared=Compared(worked=False), is_in_job=standing.is_in_job)


def _state(code: int | None) -> RankState:
    return "interrupted" if code is None else "finished" if code == 0 else "died"


def _numbered(records: list[RankRecord]) -> list[RankRecord]:
    """Number ranks as they report themselves; if two have the same number, as in two launches, by their start order."""
    if len({one.rank.rank for one in records}) == len(records):
        return records
    return [replace(one, rank=replace(one.rank, rank=number)) for number, one in enumerate(records)]
