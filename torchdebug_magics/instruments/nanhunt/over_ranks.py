"""What of one rank's hunt is held against the other ranks'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared, Sum

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import Finding, NanReport

__all__ = ["compared"]

_STAGES = ("data", "parameter", "forward", "loss", "backward", "optimizer")


def compared(report: NanReport) -> Compared:
    """When its NaN was born, and whether it was born here."""
    worked = bool(report.steps_count or report.backward_count or report.forward_count or report.found)
    finding = report.finding
    if finding is None:
        return Compared(worked=worked)
    is_received = finding.diagnosis == "averaged_from_other_ranks"
    # What could not be traced comes after all that could: it may be another rank's.
    is_traced = finding.op is not None or finding.diagnosis is not None
    stage = _STAGES.index(finding.phase) + (0 if is_traced else len(_STAGES))
    return Compared(worked=worked, found_at=(finding.step, stage), is_received=is_received, sum=_sum(finding))


def _sum(finding: Finding) -> Sum | None:
    given = finding.averaging
    if given is None:
        return None
    return Sum(dtype=given.dtype, local_peak=given.local_peak, limit=given.limit, tensor=given.tensor, location=finding.location)
