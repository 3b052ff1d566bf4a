"""``%autograd`` after a cell that failed: read from the traceback's frames and the graph; nothing runs again."""

from __future__ import annotations

from torchdebug_magics.instruments.autograd.errors.explained import explained
from torchdebug_magics.instruments.autograd.report import AutogradReport
from torchdebug_magics.instruments.autograd.verdict import verdict

__all__ = ["after_error"]

_WITHOUT_TAPE = "read from the error and the graph; `%%autograd` above the cell also records the line of every op"


def after_error(error: BaseException, *, every_step: bool = False) -> AutogradReport | None:
    """None for an error that autograd did not raise."""
    del every_step
    finding = explained(error)
    if finding is None:
        return None
    report = AutogradReport(found=True, finding=finding, findings=(finding,), problems=(_WITHOUT_TAPE,))
    return verdict(report)
