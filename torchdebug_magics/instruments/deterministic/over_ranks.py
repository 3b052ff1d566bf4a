"""Takes from one rank's deterministic report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import DeterministicReport

__all__ = ["compared"]


def compared(report: DeterministicReport) -> Compared:
    """Its batches, weights and buffers at some steps; and whether it differs from an earlier run."""
    replica = report.replica
    return Compared(
        worked=bool(replica is not None or report.ops_count or report.warnings),
        found_at=(0, 0) if report.verified is False else None,
        moments=() if replica is None else replica.moments,
        details={} if replica is None else replica.details,
        samples=() if replica is None else replica.samples,
    )
