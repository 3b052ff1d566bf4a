"""Collects the records of all ranks on rank 0: it waits for ranks that make progress, and not for one that is dead or stands still."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import stat
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import Instrument
from torchdebug_magics.machine.process_state import age_s, process_state
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.probing.distributed import this_rank
from torchdebug_magics.ranks.compared import Details, RankRecord, packed, unpacked
from torchdebug_magics.ranks.merging import merged
from torchdebug_magics.ranks.rank_traces import leave_whole, record_of, standing_here
from torchdebug_magics.ranks.report import Rank, RankFindingKind, RanksReport
from torchdebug_magics.report import Report

_LOOK_S = 0.1
_SILENT_S = 5.0
"""No sign of life, as after a SIGKILL."""
_STILL_S = 10.0
"""Alive, and at the same instruction, as in a collective that nobody else enters."""
_HURRIED_S, _MOST_HURRIED_S = 3.0, 10.0
"""The same, and in all, where rank 0 itself has failed: its launcher ends the others only when it has ended."""
_EVERY_S = 0.5
_PATIENCE = timedelta(seconds=5)
"""Timeout of a store that does not answer."""
_KINDS = ("record", "details")
_ROOM_BYTES = 64 << 20
"""In `gather`, for all ranks with a finding: rank 0 receives the largest size from every rank."""


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
        for rank, other in tuple(others.items()):
            other.look(meeting.latest_of(rank))
            if other.record.rank.report is not None:
                records[rank] = others.pop(rank).record
        if all(other.has_stopped(patience_s) for other in others.values()) or (is_hurried and time.monotonic() > end_s):
            break
        time.sleep(_LOOK_S)
    lost = (other.record.with_rank(state="died" if other.is_silent else "interrupted") for other in others.values())
    return [*records.values(), *lost]


class _Other:
    """Follows a rank that has left no report so far."""

    def __init__(self, rank: int, ranks_count: int) -> None:
        self.record = RankRecord(rank=Rank(rank=rank, pid=0, host="", device="", elapsed_s=0.0))
        self._silent_s = max(_SILENT_S, 6 * sign_every_s(ranks_count))
        self._alive_s = self._moved_s = time.monotonic()
        self._is_heard = False

    def look(self, record: RankRecord | None) -> None:
        """Take in the latest sign of life."""
        if record is None or record == self.record:
            return
        if self.record.rank.pid:  # what was there at the first look may be of a rank that is dead
            self._is_heard, self._alive_s = True, time.monotonic()
            self._moved_s = self._alive_s if record.position != self.record.position else self._moved_s
        self.record = record

    @property
    def is_silent(self) -> bool:
        """Whether its last sign of life is too old."""
        return not self._is_heard or time.monotonic() - self._alive_s > self._silent_s

    def has_stopped(self, patience_s: float) -> bool:
        """Whether it has stopped, and will probably leave no record."""
        now_s = time.monotonic()
        return now_s - self._alive_s > min(patience_s, self._silent_s) or now_s - self._moved_s > patience_s


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
            meeting = self._met()
            return own if meeting is None else meeting.merged(own, error) or own
        except Exception:  # noqa: BLE001 - whatever a store raises whose process is gone: each then has its own report
            return own

    def _met(self) -> Meeting | None:
        """The meeting, once the cell has a process group."""
        count = this_rank.world_size()
        if self._meeting is None and count > 1:
            store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()  # noqa: SLF001 - the group's own
            self._meeting = Meeting(self._row, StorePlace(store, self._prefix), this_rank.rank() or 0, count, self._began_s)
        return self._meeting

    def _stand(self) -> None:
        meeting = self._met()
        if meeting is not None:
            meeting.stand()


def meeting_place(rank: int) -> StorePlace | _Folder:
    """The same for all ranks of this job, and for no other job."""
    job = [os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        with contextlib.suppress(Exception):  # whatever a store that is not there raises
            distributed: Any = sys.modules["torch.distributed"]  # not ours to import: the script has
            store = distributed.TCPStore(host, int(port), is_master=False, timeout=_PATIENCE, wait_for_workers=False)
            return StorePlace(store, "/".join(job))
    return _Folder("/".join((host, port, *job)), [f"{rank}.{kind}" for kind in _KINDS])


class StorePlace:
    """A store of PyTorch's: a client of the launcher's beside those that the script makes, or that of a process group."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = sys.modules["torch.distributed"].PrefixStore(f"torchdebug/{prefix}", store)

    def put(self, key: str, data: bytes) -> None:
        """Store data under a key, replacing earlier data."""
        self._store.set(key, data)

    def get(self, key: str) -> bytes | None:
        """At once; None where nothing is there."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def clear(self, keys: Sequence[str]) -> None:
        """Take them away."""
        for key in keys:
            self._store.delete_key(key)


class _Folder:
    """A folder for ranks on one machine, private to the user because its files are unpickled."""

    def __init__(self, job: str, own: Sequence[str]) -> None:
        self._path = Path(tempfile.gettempdir(), f"tdm{hashlib.sha256(job.encode()).hexdigest()[:12]}")
        with contextlib.suppress(FileExistsError):
            self._path.mkdir(0o700)
        found = self._path.lstat()
        if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o077)):
            msg = f"{self._path} belongs to somebody else"
            raise OSError(msg)
        for name in own:  # of a job that was killed before it could clear up
            Path(self._path, name).unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        leave_whole(Path(self._path, key), data)

    def get(self, key: str) -> bytes | None:
        try:
            return Path(self._path, key).read_bytes()
        except FileNotFoundError:
            return None

    def clear(self, keys: Sequence[str]) -> None:  # noqa: ARG002 - all of it
        shutil.rmtree(self._path, ignore_errors=True)


class Meeting:
    """What one rank stores and, on rank 0, reads."""

    def __init__(self, row: Instrument, place: StorePlace | _Folder, rank: int, ranks_count: int, began_s: float) -> None:
        self._row = row
        self._place = place
        self._rank = rank
        self.ranks_count = ranks_count
        self._began_s = began_s

    def stand(self) -> None:
        """Say that this rank is alive, and where it stands."""
        self._put("record", packed(standing_here(self._rank, time.monotonic() - self._began_s, is_in_job=True)))

    def merged(self, report: Report, error: BaseException | None, /, *, is_hurried: bool = False, **ended: Any) -> Report | None:
        """On rank 0 the report of all; on any other None, and its record is left there. The last that a rank does; it stands no more.

        `ended` is what is known of the end of its process.
        """
        own = record_of(self._row.compared(report), self._rank, report, error, time.monotonic() - self._began_s).with_rank(**ended)
        self._put("details", zlib.compress(pickle.dumps(own.compared.details)))
        if self._rank:
            self._put("record", packed(own))
            first = self.latest_of(0)
            if isinstance(self._place, _Folder) and first is not None and process_state(first.rank.pid) is None:
                self._clear()  # rank 0 was killed, and nobody comes for it
            return None
        whole = merged(self._row.name, collected(self, own, is_hurried=is_hurried), self._details)
        with contextlib.suppress(Exception):  # a store of files keeps what it has
            self._clear()
        return whole

    def latest_of(self, rank: int) -> RankRecord | None:
        """Return where a rank stands, or its record at its end; None where it has not begun."""
        data = self._place.get(f"{rank}.record")
        return None if data is None else unpacked([data])[0]

    def _details(self, kind: RankFindingKind, step: int | None, ranks: Sequence[int]) -> Mapping[int, Details]:
        data = {rank: self._place.get(f"{rank}.details") for rank in ranks}
        left = {rank: pickle.loads(zlib.decompress(part)) if part else {} for rank, part in data.items()}  # noqa: S301 - of the same job
        return {rank: details.get((kind, step), {}) for rank, details in left.items()}

    def _put(self, kind: str, data: bytes) -> None:
        self._place.put(f"{self._rank}.{kind}", data)

    def _clear(self) -> None:
        self._place.clear([f"{rank}.{kind}" for rank in range(self.ranks_count) for kind in _KINDS])


def gather(report: Report) -> RanksReport | None:
    """Merge the reports of all ranks of the default process group: returns the merged report on rank 0, None on all others.

    A collective: every rank must call it, with its own report of the same instrument; if a rank does not, the others wait until the
    group's timeout. Raises `TorchDebugError` if no process group is initialized.
    """
    distributed: Any = sys.modules.get("torch.distributed")  # not ours to import: who has a process group has
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        msg = "gather() needs a process group: call it in each rank between init_process_group() and destroy_process_group()"
        raise TorchDebugError(msg)
    row = catalog.instrument_of(report)
    if row is None:
        msg = "gather() takes a report, such as `session.report` after `with torchdebug_magics.nanhunt() as session:`"
        raise TorchDebugError(msg)
    own = record_of(row.compared(report), distributed.get_rank(), report, sys.exc_info()[1], age_s())
    number, is_first = distributed.get_world_size(), own.rank.rank == 0
    parts: list[Any] = [None] * number
    distributed.gather_object(b"" if is_first else packed(own, _ROOM_BYTES // number), parts if is_first else None)
    if not is_first:
        while _asked(None, own) is not None:
            pass
        return None
    try:
        return merged(row.name, [own, *unpacked(parts[1:])], lambda kind, step, ranks: _asked((kind, step, ranks), own) or {})
    finally:
        _asked(None, own)


def _asked(question: tuple[RankFindingKind, int | None, Sequence[int]] | None, own: RankRecord) -> Mapping[int, Details] | None:
    """Answer rank 0's question on every rank: the details of a moment on some ranks; None when there are no more questions."""
    question = _broadcast(question, 0)
    if question is None:
        return None
    kind, step, ranks = question
    return {rank: _broadcast(own.compared.details.get((kind, step), {}) if rank == own.rank.rank else None, rank) for rank in ranks}


def _broadcast(value: Any, source: int) -> Any:
    values = [value]
    sys.modules["torch.distributed"].broadcast_object_list(values, source)
    return values[0]
