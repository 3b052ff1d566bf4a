"""Merges the reports of a job's ranks over its own process group: reports -> merged on rank 0 -> what that asks for, if anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.machine.process_state import age_s
from torchdebug_magics.ranks.compared import Details, RankRecord
from torchdebug_magics.ranks.merging import merged
from torchdebug_magics.ranks.rank_traces import record_of
from torchdebug_magics.ranks.report import RankFindingKind, RanksReport
from torchdebug_magics.ranks.transport import packed, unpacked
from torchdebug_magics.report import Report

_ROOM_BYTES = 64 << 20
"""For all ranks with a finding: rank 0 receives the largest size from every rank."""


def gather(report: Report) -> RanksReport | None:
    """Merge the reports of all ranks of the default process group: returns the merged report on rank 0, None on all others.

    A collective: every rank must call it, with its own report of the same instrument; if a rank does not, the others wait until the
    group's timeout. Raises `TorchDebugError` if no process group is initialized.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        msg = "gather() needs a process group: call it in each rank between init_process_group() and destroy_process_group()"
        raise TorchDebugError(msg)
    row = catalog.instrument_of(report)
    if row is None:
        msg = "gather() takes a report, such as `session.report` after `with torchdebug_magics.nanhunt() as session:`"
        raise TorchDebugError(msg)
    own = record_of(row.compared(report), distributed.get_rank(), report, sys.exc_info()[1], age_s())
    records = _records(own)
    if own.rank.rank:
        while _asked(None, own) is not None:
            pass
        return None
    try:
        return merged(row.name, records, lambda kind, step, ranks: _asked((kind, step, ranks), own) or {})
    finally:
        _asked(None, own)


def _records(own: RankRecord) -> list[RankRecord]:
    """Gather the records of all ranks, without details; empty on all ranks but 0."""
    number = distributed.get_world_size()
    is_first = own.rank.rank == 0
    parts: list[Any] = [None] * number
    distributed.gather_object(b"" if is_first else packed(own, _ROOM_BYTES // number), parts if is_first else None)
    return [own, *unpacked(parts[1:])] if is_first else []


def _asked(question: tuple[RankFindingKind, int | None, Sequence[int]] | None, own: RankRecord) -> Mapping[int, Details] | None:
    """Answer rank 0's question on every rank: the details of a moment on some ranks; None when there are no more questions."""
    question = _broadcast(question, 0)
    if question is None:
        return None
    kind, step, ranks = question
    return {rank: _broadcast(own.compared.details.get((kind, step), {}) if rank == own.rank.rank else None, rank) for rank in ranks}


def _broadcast(value: Any, source: int) -> Any:
    values = [value]
    distributed.broadcast_object_list(values, source)
    return values[0]
