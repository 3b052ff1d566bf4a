"""Takes from one rank's hangwatch report what ranks are compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.ranks.compared import Compared

if TYPE_CHECKING:
    from torchdebug_magics.instruments.hangwatch.report import HangReport

__all__ = ["compared"]


def compared(report: HangReport) -> Compared:
    """Whether it stood still; the launcher's own report, which has seen all of them, is shown before a rank's."""
    return Compared(found_at=(0, 0) if report.state in {"stuck", "slow"} or report.cause is not None else None)
