"""Enters a session of each instrument for one cell, and judges their reports together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import SCRIPT, CellContext, finished
from torchdebug_magics.instruments.watch.examine import explained, what_ended
from torchdebug_magics.instruments.watch.report import WatchReport, judged, stage_of
from torchdebug_magics.instruments.watch.tried_fixes import tried, with_fix_of
from torchdebug_magics.probing.modules import one_moment
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.training_again import TrainingAgain
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

_OPTIONS: Mapping[str, Mapping[str, Any]] = {"hangwatch": {}, "memtrace": {"light": True}, "gradwatch": {}, "autograd": {}, "nanhunt": {}}
"""The instruments, the outermost first: what the inner ones run again, the outer ones must tell from the user's own."""
_SATURATING = frozenset({"tanh", "sigmoid", "relu", "hardtanh"})
"""Ops whose derivative is 0 where their inputs are far from 0: other inputs, or smaller steps, may mend what autograd sees of it."""


class WatchProbe:
    """A session of each instrument, entered and left with the cell."""

    def __init__(self, context: CellContext = SCRIPT, *, guard: str | None = None) -> None:
        self._unshown, self._file, self._doing = context.unshown, context.file(), ""
        self._rows = {name: catalog.instrument(name) for name in _OPTIONS}
        self._sessions: dict[str, Session[Any]] = {}
        for name, row in self._rows.items():
            options = {**_OPTIONS[name], "guard": guard} if name == "memtrace" else _OPTIONS[name]
            self._sessions[name] = Session(row.probe(options, context.of(row.name)))
        self._error: BaseException | None = None
        """What ended the cell, until the report is made."""
        self._problems: list[str] = []
        self._end = ExitStack()
        """Closed when all sessions have left."""

    def attach(self, stack: ExitStack) -> None:
        """Enter all sessions; the cell goes on without one that cannot begin."""
        stack.callback(self._end.close)
        with one_moment():
            for name, session in self._sessions.items():
                if self._runs(name, "could not begin", session.__enter__):
                    stack.callback(self._leave, name)
        stack.push(self._ended)  # the first to be called: all sessions leave with what ended the cell

    def sweep(self) -> None:
        """Remove what an interrupt has left."""
        for session in reversed(self._sessions.values()):
            session.sweep()

    def report(self) -> WatchReport:
        """The reports, judged; an error of the cell that none of them explains is looked at by those that explain one afterwards."""
        reports = {}
        for name, session in self._sessions.items():
            if not session.has_ended:
                self._leave(name)
            if session.has_ended:
                reports[name] = session.report
        error, self._error = self._error, None  # it holds the user's frames
        magics = {name: row.magic for name, row in self._rows.items()}
        if error is not None and stage_of(reports) not in {"end", "outcome"}:
            after: list[tuple[str, Report] | None] = []
            self._runs("watch", "could not look at the error", lambda: after.append(explained(CellContext(last_error=error))))
            for name, explanation in filter(None, after):  # by what the error has left behind
                reports[name] = replace(explanation, cut_short=type(error).__name__)
                magics[name] = catalog.instrument(name).magic
        report = judged(reports, magics)
        if not isinstance(error, KeyboardInterrupt):
            report = self._with_fixes_tried(report, magics, error)
        ended = {} if error is None or report.found else what_ended(error)
        return replace(report, **ended, problems=tuple(dict.fromkeys(self._problems)))

    def _with_fixes_tried(self, report: WatchReport, magics: Mapping[str, str], error: BaseException | None) -> WatchReport:
        """The report after trials of its fix, or of other settings; as it was where they are interrupted."""
        guard, reports = Guard(), dict(report.reports)
        again = TrainingAgain(self._file, guard, self._unshown)
        raised = error is not None and not isinstance(error, TorchDebugError)
        finding = report.main_finding()
        is_of_the_rate = report.instrument is None or getattr(finding, "has_diverged", False)
        name = "gradwatch" if is_of_the_rate and not raised else report.instrument
        stalled: Any = reports.get("gradwatch")

        has_stalled = stalled is not None and bool(stalled.doubts) and not raised
        is_saturated = not raised and getattr(finding, "op", None) in _SATURATING and not getattr(finding, "edits", ())

        def tried_of(name: str) -> Report:
            seen = finished(reports[name], error)
            return tried(name, seen, again, self._tells, steps=report.steps_count, raised=raised, has_stalled=has_stalled)

        def look() -> None:
            if name in reports:
                reports[name] = tried_of(name)
            may_help = has_stalled or (is_saturated and bool(getattr(stalled, "alternatives", ())))
            if name == "autograd" and may_help and reports[name].fix_state != "verified":
                own, other = reports[name], tried_of("gradwatch")
                is_of_own = not own.edits or own.edits[0].line == next((edit.line for edit in other.edits), 0)
                reports["autograd" if is_of_own else "gradwatch"] = with_fix_of(other, own) if is_of_own else other

        try:
            self._runs("watch", "could not try a fix", look)
        except KeyboardInterrupt:
            guard.note("the trial of the fix was interrupted")
        self._problems += guard.problems
        return judged(reports, magics)

    def _tells(self, doing: str) -> None:
        self._doing = doing

    def live(self) -> object | None:
        """Whether the cell makes progress, or what is tried behind it."""
        return self._doing or self._sessions["hangwatch"].live()

    def kept(self) -> dict[str, object]:
        """What all of them keep."""
        return {name: value for session in self._sessions.values() for name, value in session.kept.items()}

    def traceback_of(self, error: BaseException) -> list[str]:
        """Of the first that shortens it."""
        return next(filter(None, (session.traceback_of(error) for session in self._sessions.values())), [])

    def standing(self) -> str | None:
        """Why the cell makes no progress."""
        recorded = [session for session in self._sessions.values() if session.is_recorded]
        return next(filter(None, (session.standing() for session in recorded)), "") if recorded else None

    def _ended(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._error = error

    def _leave(self, name: str) -> None:
        error = self._error
        if name != "nanhunt":  # which may run statements of the user's again, and is the first to leave
            self._end.enter_context(one_moment())
        try:
            self._runs(name, "could not end", self._sessions[name].__exit__, error and type(error), error, error and error.__traceback__)
        except TorchDebugError as found_at_the_end:
            self._error = found_at_the_end
            raise

    def _runs(self, name: str, otherwise: str, call: Callable[..., object], *values: object) -> bool:
        """Whether a call of ours ended by itself; a failure of ours is a line in the report, and never the user's."""
        try:
            call(*values)
        except TorchDebugError:
            raise
        except Exception as failure:  # noqa: BLE001 - as above
            self._problems.append(f"{catalog.instrument(name).magic} {otherwise}: {type(failure).__name__}: {failure}")
            return False
        return True


watch = WatchProbe
