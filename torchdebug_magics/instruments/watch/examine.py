"""After a cell that failed or was stopped: the explanation of the instrument that has one, else what to run next."""

from __future__ import annotations

import traceback

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
    return WatchReport(suggestion="%%torchdebug", stopped_at=_innermost(context.last_error), error=_what(context))


def explained(context: CellContext) -> tuple[str, Report] | None:
    """The instrument that explains an error by what it has left behind, and its report."""
    for name in catalog.INSTRUMENTS:
        row = catalog.instrument(name)
        if row.module != __package__ and row.watches and row.examines:
            report = row.examined((), {}, context).report
            if report is not None and report.main_finding() is not None:
                return name, report
    return None


def _what(context: CellContext) -> str:
    return "The cell was stopped" if isinstance(context.last_error, KeyboardInterrupt) else context.last_error_line


def _innermost(error: BaseException) -> Location | None:
    """The innermost line of the user's code in an error's traceback."""
    own = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    return location(own[-1][0].co_filename, own[-1][1], own[-1][0].co_name) if own else None
