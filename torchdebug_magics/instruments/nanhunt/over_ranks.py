"""What of one rank's hunt is held against the other ranks'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanReport

__all__ = ["compared"]

_STAGES = ("data", "parameter", "forward", "loss", "backward", "optimizer")


def compared(report: NanReport) -> Compared:
    """When its NaN was born, and whether it was born here."""
    worked = bool(report.steps_count or report.backward_count or report.forward_count or report.found)
    finding = report.finding
    if finding is None:
        return Compared(worked=worked)
    return Compared(
        worked=worked, found_at=(finding.step, _STAGES.index(finding.phase)), is_received=finding.diagnosis == "averaged_from_other_ranks"
    )
