"""What one rank sends to be merged with the others: its row, and the plain values by which ranks are compared; small enough to travel.

`compared` of an instrument's report takes these values. Of a rank without a finding, at most 4 KB are sent, so that ten thousand of them
have room in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchdebug_magics.ranks.report import Rank, RankFindingKind
from torchdebug_magics.report import Location, Report, changed

HEALTHY_BYTES = 4096
"""The size limit of a rank that finished and found nothing, before compression; unpickled it takes a few times as much."""
_ATTEMPTS = ((64, 64), (16, 16), (8, 8), (8, 1))
"""(longest list that stays whole, items kept of a longer one); fewer than eight items may be a point or a shape."""
_CUT = "shortened on the way to rank 0: "
Details = Mapping[str, int]
"""A digest, or a size, by the name of the tensor or module."""


class Moment(NamedTuple):
    """The digest of a state that should be equal on all ranks, or, for ``same_batch``, different."""

    kind: RankFindingKind
    """The finding if that does not hold."""
    step: int | None
    digest: int
    location: Location | None = None
    of: int = 0
    """Identifies what the state belongs to, such as one of two models: only moments of the same one are compared."""
    cause: str = ""
    """A slug for what the rank itself knows of the cause; empty where only the comparison tells."""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A gradient that was finite before a collective and non-finite after it."""

    dtype: str
    local_peak: float
    """The largest magnitude of this rank's own gradient."""
    limit: float
    """The largest number of that dtype."""
    tensor: str
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Which samples a rank draws from one dataset for training."""

    of: int
    """The model that it trains: only samples for the same model are compared."""
    dataset_count: int
    replicas_count: int
    """Of its `DistributedSampler`; 0 where it has none."""
    replica: int
    """The rank that its `DistributedSampler` draws for."""
    seeds: tuple[int | None, ...]
    """By which a `DistributedSampler` shuffles each epoch; None where it does not shuffle."""
    rows: bytes
    """The smallest digests of the rows of the first batches, four bytes each; empty where equal rows prove nothing."""
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one rank's report is compared by."""

    worked: bool = True
    """Whether the rank did anything that the instrument watches."""
    found_at: tuple[int, int] | None = None
    """(step, stage of the step) of its finding; None where it has none."""
    is_received: bool = False
    """Whether that finding came from another rank, as a NaN does with averaged gradients."""
    found_backward: int | None = None
    """The backward pass of that finding."""
    skipped_backwards: tuple[int, ...] = ()
    """Backward passes with non-finite gradients whose update a GradScaler skipped."""
    sum: Sum | None = None
    size_bytes: int | None = None
    """Peak memory; ranks of one job use about the same."""
    sites: tuple[tuple[str, int, Location | None], ...] = ()
    """The largest parts of that peak: name, bytes and line."""
    moments: tuple[Moment, ...] = ()
    """In the order of time."""
    samples: tuple[Samples, ...] = ()
    details: Mapping[tuple[RankFindingKind, int | None], Details] = field(default_factory=dict)
    """The values behind the digest of a moment, by name. `gather` asks for them where ranks differ; with a launcher they come at once."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's row and what it is compared by, ready to be merged; of a rank that has left no report, where it was last seen."""

    rank: Rank
    compared: Compared = field(default_factory=lambda: Compared(worked=False))
    is_in_job: bool = True
    """Whether it was one of several processes of a distributed job, and not a process that serves another purpose."""
    problems: tuple[str, ...] = ()
    """What went wrong outside the report, such as opening its session."""
    position: int = 0
    """Of a rank that runs: another one whenever its main thread has gone on, in whatever code."""
    live: object = field(default=None, compare=False)
    """Of a rank that runs: the snapshot for the live view."""

    def without_details(self) -> RankRecord:
        """The record as it is sent to rank 0."""
        return replace(self, compared=replace(self.compared, details={}))

    def with_rank(self, **changes: Any) -> RankRecord:
        """The same with another row."""
        return replace(self, rank=replace(self.rank, **changes))


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
