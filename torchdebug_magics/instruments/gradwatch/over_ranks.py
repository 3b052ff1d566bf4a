"""Takes from one rank's gradwatch report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.gradwatch.report import GradReport

__all__ = ["compared"]


def compared(report: GradReport) -> Compared:
    """Whether it has a finding, and after how many steps."""
    worked = bool(report.steps_count or report.backward_count or report.found)
    return Compared(worked=worked, found_at=(report.finding.step, 0) if report.finding is not None else None)
