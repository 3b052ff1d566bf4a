"""After a cell that failed or was stopped: the explanation of the instrument that has one, else what to run next."""

from __future__ import annotations

import traceback
from typing import Any

from torchdebug_magics import catalog
from torchdebug_magics.instrument import CellContext
from torchdebug_magics.instruments.watch.report import WatchReport
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import Location, Report


def examine(context: CellContext, **_of_a_session: object) -> Report | None:
    """The report on the error of the previous cell; None where it ended without one."""
    if context.last_error is None:
        return None
    after = explained(context)
    if after is not None:
        return after[1]
    return WatchReport(suggestion="%%torchdebug", **what_ended(context.last_error))


def explained(context: CellContext) -> tuple[str, Report] | None:
    """The instrument that explains an error by what it has left behind, and its report."""
    for name in catalog.INSTRUMENTS:
        row = catalog.instrument(name)
        if row.module != __package__ and row.watches and row.examines:
            report = row.examined((), {}, context).report
            if report is not None and report.main_finding() is not None:
                return name, report
    return None


def what_ended(error: BaseException) -> dict[str, Any]:
    """The fields of a report on a cell whose end nothing explains."""
    line = "The cell was stopped" if isinstance(error, KeyboardInterrupt) else CellContext(last_error=error).last_error_line
    return {"error": line, "stopped_at": _innermost(error)}


def _innermost(error: BaseException) -> Location | None:
    """The innermost line of the user's code in an error's traceback."""
    own = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return location(own[-1][0].co_filename, own[-1][1], own[-1][0].co_name) if own else None
