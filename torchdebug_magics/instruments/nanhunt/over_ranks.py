"""Takes from one rank's nanhunt report what ranks are compared by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared, Sum

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport

__all__ = ["compared"]

_MOST_SKIPPED = 64
_STAGES = ("data", "parameter", "forward", "loss", "backward", "optimizer")


def compared(report: NanReport) -> Compared:
    """The step of its first non-finite value, and whether that came from another rank."""
    worked = bool(report.steps_count or report.backward_count or report.forward_count or report.found)
    finding = report.finding
    if finding is None:
        return Compared(worked=worked, skipped_backwards=_skipped(report))
    is_received = finding.diagnosis == "averaged_from_other_ranks"
    # What could not be traced comes after all that could: it may be another rank's.
    is_traced = finding.op is not None or finding.diagnosis is not None
    stage = _STAGES.index(finding.phase) + (0 if is_traced else len(_STAGES))
    return Compared(
        worked=worked, found_at=(finding.step, stage), is_received=is_received, found_backward=finding.backward, sum=_sum(finding)
    )


def _skipped(report: NanReport) -> tuple[int, ...]:
    if not report.overflow_steps_count:
        return ()
    first = report.backward_count - len(report.history)
    return tuple(first + place for place, peak in enumerate(report.history) if not math.isfinite(peak))[-_MOST_SKIPPED:]


def _sum(finding: Finding) -> Sum | None:
    given = finding.averaging
    if given is None:
        return None
    return Sum(dtype=given.dtype, local_peak=given.local_peak, limit=given.limit, tensor=given.tensor, location=finding.location)
