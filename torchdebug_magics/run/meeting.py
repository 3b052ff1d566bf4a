"""Exchanges records between the ranks of a job, through the launcher's store, which outlives process groups, or a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchdebug_magics.machine.process_state import process_state
from torchdebug_magics.probing.children.rank_traces import leave_whole
from torchdebug_magics.ranks.transport import packed, unpacked

if TYPE_CHECKING:
    from torchdebug_magics.probing.children.rank_traces import Standing
    from torchdebug_magics.ranks.compared import Details, RankRecord
    from torchdebug_magics.ranks.disagreements import Asked
    from torchdebug_magics.ranks.report import RankFindingKind

__all__ = ["Meeting", "StorePlace", "meeting_place"]

_PATIENCE = timedelta(seconds=5)
"""Timeout of a store that does not answer."""
_KINDS = ("standing", "record", "details")


class _Place(Protocol):
    def put(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def clear(self, keys: Sequence[str]) -> None: ...


def meeting_place(rank: int) -> _Place:
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

    def __init__(self, place: _Place, rank: int, ranks_count: int) -> None:
        self._place = place
        self._rank = rank
        self.ranks_count = ranks_count

    def stand(self, standing: Standing) -> None:
        """Say that this rank is alive, and where it stands."""
        self._place.put(f"{self._rank}.standing", pickle.dumps(standing))

    def leave(self, record: RankRecord) -> None:
        """The last that this rank does."""
        self._place.put(f"{self._rank}.details", zlib.compress(pickle.dumps(record.compared.details)))
        self._place.put(f"{self._rank}.record", packed(record))
        first = self.standing_of(0)
        if isinstance(self._place, _Folder) and first is not None and process_state(first.pid) is None:
            self.clear()  # rank 0 was killed, and nobody comes for it

    def record_of(self, rank: int) -> RankRecord | None:
        """Return the record of a rank; None if it has stored none so far."""
        data = self._place.get(f"{rank}.record")
        return None if data is None else unpacked([data])[0]

    def standing_of(self, rank: int) -> Standing | None:
        """The latest; None where it has not begun."""
        data = self._place.get(f"{rank}.standing")
        standing: Standing | None = None if data is None else pickle.loads(data)  # noqa: S301 - from a rank of the same job
        return standing

    def details_beside(self, own: RankRecord) -> Asked:
        """From what the ranks have left, and what this one has."""

        def details(kind: RankFindingKind, step: int | None, ranks: Sequence[int]) -> Mapping[int, Details]:
            return {rank: self._details_of(rank, own).get((kind, step), {}) for rank in ranks}

        return details

    def clear(self) -> None:
        """Leave nothing behind."""
        self._place.clear([f"{rank}.{kind}" for rank in range(self.ranks_count) for kind in _KINDS])

    def _details_of(self, rank: int, own: RankRecord) -> Mapping[Any, Details]:
        data = None if rank == own.rank.rank else self._place.get(f"{rank}.details")
        details: Mapping[Any, Details] = own.compared.details
        if rank != own.rank.rank:
            details = {} if data is None else pickle.loads(zlib.decompress(data))  # noqa: S301 - from a rank of the same job
        return details
