"""A cell that runs in several ipyparallel engines of one job, under ``%%px``: rank 0's engine shows one report, the others nothing."""

from __future__ import annotations

import contextlib
import sys
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing import this_rank
from torchdebug_magics.probing.children.rank_traces import record_of, standing_here
from torchdebug_magics.ranks.merging import merged
from torchdebug_magics.run.last_ranks import collected
from torchdebug_magics.run.meeting import Meeting, StorePlace

if TYPE_CHECKING:
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.report import Report

__all__ = ["EngineCell"]

_EVERY_S = 0.5


class EngineCell:
    """One session of one cell. Engines that have no process group in common each show their own report."""

    _runs: ClassVar[Counter[str]] = Counter()
    """How often each cell ran: every engine counts the same."""

    def __init__(self, row: Instrument, source: str) -> None:
        self._row = row
        name = f"{row.name}/{zlib.crc32(source.encode())}"
        self._runs[name] += 1
        self._prefix = f"{name}/{self._runs[name]}"
        self._began_s = time.monotonic()
        self._meeting: Meeting | None = None
        self._sampler = Sampler(self._stand, name="rank", every_s=_EVERY_S, first_s=0.0)

    @property
    def is_shown_elsewhere(self) -> bool:
        """Whether another engine shows the report of this one, too."""
        return this_rank.world_size() > 1 and bool(this_rank.rank())

    def begin(self) -> None:
        """Say from now on that this rank is alive."""
        self._sampler.start()

    def merged(self, own: Report, error: BaseException | None) -> Report:
        """On rank 0 the report of all, else its own."""
        self._sampler.stop()
        try:
            return self._merged(own, error)
        except Exception:  # noqa: BLE001 - whatever a store raises whose process is gone: each then has its own report
            return own

    def _merged(self, own: Report, error: BaseException | None) -> Report:
        meeting = self._met()
        if meeting is None:
            return own
        rank = this_rank.rank() or 0
        record = record_of(self._row.name, rank, own, error, time.monotonic() - self._began_s)
        if rank:
            meeting.leave(record)
            return own
        records = collected(meeting, record, is_hurried=False)
        report = merged(self._row.name, records, meeting.details_beside(record))
        with contextlib.suppress(Exception):  # a store of files keeps what it has
            meeting.clear()
        return report

    def _met(self) -> Meeting | None:
        count = this_rank.world_size()
        if self._meeting is None and count > 1:
            store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()  # noqa: SLF001 - the group's own
            self._meeting = Meeting(StorePlace(store, self._prefix), this_rank.rank() or 0, count)
        return self._meeting

    def _stand(self) -> None:
        meeting: Any = self._met()
        if meeting is not None:
            meeting.stand(standing_here(this_rank.rank() or 0, time.monotonic() - self._began_s, is_in_job=True))
