"""The plain values by which ranks are compared; `compared` of an instrument's report takes them from one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchdebug_magics.ranks.report import Rank, RankFindingKind
from torchdebug_magics.report import Location

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
