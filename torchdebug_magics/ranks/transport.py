"""Makes a rank small enough to travel: of one without a finding, at most 4 KB, so that ten thousand of them have room in one process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchdebug_magics.ranks.compared import RankRecord
from torchdebug_magics.report import Report, changed

HEALTHY_BYTES = 4096
"""The size limit of a rank that finished and found nothing, before compression; unpickled it takes a few times as much."""
_ATTEMPTS = ((64, 64), (16, 16), (8, 8), (8, 1))
"""(longest list that stays whole, items kept of a longer one); fewer than eight items may be a point or a shape."""
_CUT = "shortened on the way to rank 0: "


def packed(record: RankRecord, most_bytes: int | None = None) -> bytes:
    """Pickle and compress a record without its details; `most_bytes` limits a rank with a finding."""
    record = record.without_details()
    is_healthy = record.compared.found_at is None and record.rank.state == "finished"
    limit = HEALTHY_BYTES if is_healthy else most_bytes
    data = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
    for most, kept in _ATTEMPTS:
        if limit is None or len(data) <= limit:
            break
        data = pickle.dumps(_with_note(record, changed(record, functools.partial(_shortened, most, kept))), pickle.HIGHEST_PROTOCOL)
    return zlib.compress(data)


def unpacked(parts: Iterable[bytes]) -> list[RankRecord]:
    """Return the records that `packed` has packed."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look through all of them again and again, while nothing of it is garbage
    try:
        return [pickle.loads(zlib.decompress(part)) for part in parts]  # noqa: S301 - from ranks of the same job
    finally:
        if was_enabled:
            gc.enable()


def is_cut(report: Report) -> bool:
    """Whether it was shortened on its way: then its lists may no longer fit together."""
    return any(map(says_cut, report.problems))


def says_cut(problem: str) -> bool:
    """Whether that line of a report says only this."""
    return problem.startswith(_CUT)


def _shortened(most: int, kept: int, value: Any) -> Any:
    """Cut a list with more than `most` items to its first `kept`."""
    if isinstance(value, Mapping) and len(value) > most:
        return dict(list(value.items())[:kept])
    return value[:kept] if type(value) in {tuple, list} and len(value) > most else value


def _with_note(whole: RankRecord, small: RankRecord) -> RankRecord:
    """The report says itself which of its fields are not whole."""
    report, before = small.rank.report, whole.rank.report
    if report is None or before is None or report is before:
        return small
    names = [field.name for field in dataclasses.fields(report) if getattr(report, field.name) is not getattr(before, field.name)]
    return small.with_rank(report=replace(report, problems=(*report.problems, f"{_CUT}{', '.join(names)}")))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all processes launched by one session share; it is pickled to each of them."""

    folder: str
    module: str
    """The package of the instrument."""
    options: Mapping[str, Any]
    launcher: int
    """Its process."""
