"""Takes from one rank's autograd report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.report import AutogradReport

__all__ = ["compared"]


def compared(report: AutogradReport) -> Compared:
    """Whether it has a finding, and after how many steps."""
    worked = bool(report.steps_count or report.backward_count or report.found)
    return Compared(worked=worked, found_at=(report.steps_count, 0) if report.found else None)
