"""The magics of the instruments, made from the rows of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from IPython.core.error import UsageError
from IPython.core.magic import needs_local_scope, no_var_expand

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import Examined
from torchdebug_magics.jupyter.arguments import MagicParser
from torchdebug_magics.jupyter.showing import Delivery, ShownSession
from torchdebug_magics.jupyter.values import evaluated

if TYPE_CHECKING:
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.jupyter.arguments import Arguments
    from torchdebug_magics.jupyter.cell import CellSessions
    from torchdebug_magics.jupyter.display import Screen
    from torchdebug_magics.report import Report
    from torchdebug_magics.session import Session

__all__ = ["InstrumentMagic", "Keep"]

Keep: TypeAlias = "Callable[[str, Report, Session[Any] | None], None]"
"""Told of each report: the magic's name, and the session where there was one."""


class InstrumentMagic:
    """``%%name`` around a cell, ``%name`` from here to the end of the cell, ``%name VALUE`` to examine a value."""

    def __init__(self, row: Instrument, cells: CellSessions, screen: Screen, keep: Keep) -> None:
        self.row = row
        self.parser = MagicParser(row)
        self._cells = cells
        self._screen = screen
        self._keep = keep

    def functions(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """What IPython calls for the line and for the cell form."""

        @no_var_expand
        @needs_local_scope
        def line(text: str, local_ns: dict[str, object] | None = None) -> None:
            __tracebackhide__ = True
            self._line(text, local_ns or {})

        @no_var_expand
        def cell(text: str, body: str | None) -> object:
            __tracebackhide__ = True
            if body is None:  # as `MagicLines` writes it: the body is the rest of the running cell
                self._open(text, subjects=False)
                return None
            # Reached by code that calls run_cell_magic itself, as a notebook exported to a script does.
            return self._cells.run_as_cell(f"%%{self.row.name} {text}\n{body}")

        line.__doc__ = cell.__doc__ = self.parser.help
        line.__name__ = cell.__name__ = self.row.name
        return line, cell

    def _line(self, text: str, local_ns: dict[str, object]) -> None:
        __tracebackhide__ = True
        asked = self.parser.parse(text, subjects=True)
        if asked.help:
            self._open(text, subjects=True)
        elif asked.subjects:
            subjects, keywords = self._evaluated(asked.subjects, local_ns)
            with _in_one_line():
                examined = self.row.report_on(subjects, keywords, asked.options)
            self._show(asked, examined)
        elif (report := self._of_failed_cell(asked)) is not None:
            self._show(asked, Examined(report))
        else:
            self._open(text, subjects=True)

    def _evaluated(self, sources: tuple[str, ...], local_ns: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The values, read as the arguments of a call are."""
        values, named = evaluated(sources, self._screen.shell.user_ns, local_ns, self.row.subject_of)
        if named and not self.row.takes_keywords:
            msg = f"%{self.row.name} takes no named value such as {next(iter(named))}=..."
            raise UsageError(msg)
        return values, named

    def _of_failed_cell(self, asked: Arguments) -> Report | None:
        """What the error tells in which the cell before this one ended."""
        last = self._screen.shell.last_execution_result
        error = None if last is None else last.error_in_exec
        return None if error is None else self.row.report_after(error, asked.options)

    def _show(self, asked: Arguments, examined: Examined) -> None:
        __tracebackhide__ = True
        Delivery(self.row, asked, self._screen, lambda name, kept: self._keep(name, kept, None))(examined.report)
        if examined.error is not None:
            raise examined.error

    def _open(self, text: str, *, subjects: bool) -> None:
        __tracebackhide__ = True
        asked = self.parser.parse(text, subjects=subjects)
        if asked.help:
            self._screen.say(self.parser.help)
            return
        with _in_one_line():
            session = self.row.session(**asked.options)
        deliver = Delivery(self.row, asked, self._screen, lambda name, report: self._keep(name, report, session))
        self._cells.open(self.row.name, ShownSession(session, deliver))


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What was asked in the wrong way is said as of any magic."""
    __tracebackhide__ = True
    try:
        yield
    except TorchDebugError as error:
        raise UsageError(str(error)) from None
