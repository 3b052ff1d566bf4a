"""Enters a session of each instrument for one cell, and judges their reports together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from torchdebug_magics import catalog
from torchdebug_magics.errors import SessionError
from torchdebug_magics.instrument import SCRIPT, CellContext
from torchdebug_magics.instruments.watch.examine import explained, what_ended
from torchdebug_magics.instruments.watch.report import WatchReport, judged
from torchdebug_magics.session import Session

_OPTIONS: Mapping[str, Mapping[str, Any]] = {"hangwatch": {}, "memtrace": {"light": True}, "gradwatch": {}, "autograd": {}, "nanhunt": {}}
"""The instruments, the outermost first: what the inner ones run again, the outer ones must tell from the user's own."""


def watch(context: CellContext = SCRIPT, *, guard: str | None = None) -> WatchProbe:
    """The probe of a session."""
    return WatchProbe(context, guard=guard)


class WatchProbe:
    """A session of each instrument, entered and left with the cell."""

    def __init__(self, context: CellContext, *, guard: str | None) -> None:
        self._rows = {name: catalog.instrument(name) for name in _OPTIONS}
        self._sessions: dict[str, Session[Any]] = {}
        for name, row in self._rows.items():
            options = {**_OPTIONS[name], "guard": guard} if name == "memtrace" else _OPTIONS[name]
            self._sessions[name] = Session(row.probe(options, context.of(row.name)))
        self._error: BaseException | None = None
        self._problems: list[str] = []

    def attach(self, stack: ExitStack) -> None:
        """Enter all sessions; the cell goes on without one that cannot begin."""
        stack.push(self._ended)
        for name, session in self._sessions.items():
            try:
                stack.enter_context(session)
            except Exception as error:  # noqa: BLE001 - a failure of ours is a line in the report
                self._problems.append(f"{self._rows[name].magic} could not begin: {type(error).__name__}: {error}")

    def sweep(self) -> None:
        """Leave what an interrupt has left open."""
        for session in reversed(self._sessions.values()):
            session.__exit__(None, None, None)

    def report(self) -> WatchReport:
        """The reports, judged; an error of the cell that none of them explains is looked at by those that explain one afterwards."""
        reports = {}
        for name, session in self._sessions.items():
            with contextlib.suppress(SessionError):  # it could not begin
                reports[name] = session.report
        magics = {name: row.magic for name, row in self._rows.items()}
        report = judged(reports, magics, tuple(self._problems))
        finding = report.finding
        is_explained = finding is not None and finding.stage in {"end", "outcome"}
        after = None if self._error is None or is_explained else explained(CellContext(last_error=self._error))
        if after is None:
            return report if self._error is None or report.found else replace(report, **what_ended(self._error))
        name, explanation = after
        return judged({**reports, name: explanation}, {**magics, name: catalog.instrument(name).magic}, report.problems)

    def live(self) -> object | None:
        """Whether the cell makes progress."""
        return self._sessions["hangwatch"].live()

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
