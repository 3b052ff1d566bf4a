"""What one rank tells of its report so that ranks can be compared: plain values, from a function that the instrument's row names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchdebug_magics.ranks.report import Rank, RankFindingKind
    from torchdebug_magics.report import Location

__all__ = ["Compared", "Details", "Moment", "RankRecord", "Sum"]

Details = Mapping[str, int]
"""A digest, or a size, by the name of the tensor or module."""


class Moment(NamedTuple):
    """A state that ranks should have in common (or, of ``same_batch``, should not), in one digest."""

    kind: RankFindingKind
    """What is wrong if it is not so."""
    step: int | None
    digest: int
    location: Location | None = None
    of: int = 0
    """What it is a state of, such as one of two models: only moments of the same are compared."""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A gradient that came out of a collective non-finite, and was finite before it."""

    dtype: str
    local_peak: float
    """The largest magnitude that this rank put in."""
    limit: float
    """The largest number of that dtype."""
    tensor: str
    location: Location | None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What of one rank's report is held against the others'."""

    worked: bool = True
    """Whether it did anything that the instrument looks at."""
    found_at: tuple[int, int] | None = None
    """(step, stage of the step) of its finding; None where it has none."""
    is_received: bool = False
    """Whether that finding came from another rank, as a NaN does with averaged gradients."""
    sum: Sum | None = None
    size_bytes: int | None = None
    """What it took of memory; ranks of one job take about the same."""
    sites: tuple[tuple[str, int, Location | None], ...] = ()
    """Of that, the largest parts: what, bytes, and its line."""
    moments: tuple[Moment, ...] = ()
    """In the order of time."""
    details: Mapping[tuple[RankFindingKind, int | None], Details] = field(default_factory=dict)
    """What the digest of a moment is made of; it stays in the rank until somebody asks for it."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank, ready to be merged."""

    rank: Rank
    compared: Compared
    is_in_job: bool = True
    """Whether it was one of several processes of a distributed job; else it is a process that the launcher has started for anything."""
    problems: tuple[str, ...] = ()
    """What went wrong beside the report, as in opening its session."""

    def without_details(self) -> RankRecord:
        """Small enough to travel."""
        return replace(self, compared=replace(self.compared, details={}))
