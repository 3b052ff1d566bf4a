"""The magics of the instruments, made from the rows of the catalog."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from IPython.core.error import UsageError
from IPython.core.magic import needs_local_scope, no_var_expand

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import Examined
from torchdebug_magics.jupyter.again import CellBody
from torchdebug_magics.jupyter.arguments import MagicParser
from torchdebug_magics.jupyter.showing import Delivery, ShownSession, folded, watched_work
from torchdebug_magics.jupyter.values import evaluated

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Fold
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.jupyter.arguments import Arguments
    from torchdebug_magics.jupyter.cell import CellSessions
    from torchdebug_magics.jupyter.display import Screen
    from torchdebug_magics.jupyter.lasting import LastingSessions
    from torchdebug_magics.jupyter.recorder import Recorder
    from torchdebug_magics.jupyter.reruns import Reruns
    from torchdebug_magics.report import Report
    from torchdebug_magics.session import Session

__all__ = ["Homes", "InstrumentMagic", "Keep"]

Keep: TypeAlias = "Callable[[str, Report, Session[Any] | None], None]"
"""Called with each report: the magic's name, the report, and its session if there was one."""


class Homes(NamedTuple):
    """Owners of open sessions, and memory across runs of a cell."""

    cells: CellSessions
    lasting: LastingSessions
    reruns: Reruns


class InstrumentMagic:
    """``%%name`` around a cell, ``%name`` to its end, ``%name on`` until ``%name off``, ``%name VALUE`` to examine a value."""

    def __init__(self, row: Instrument, homes: Homes, recorder: Recorder, screen: Screen, keep: Keep) -> None:
        self.row = row
        self.parser = MagicParser(row)
        self._homes = homes
        self._recorder = recorder
        self._screen = screen
        self._keep = keep
        self._names = frozenset(catalog.INSTRUMENTS)

    def functions(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """The function to register with IPython, for line and cell form."""

        @no_var_expand
        @needs_local_scope
        def line(text: str, local_ns: dict[str, object] | None = None) -> None:
            __tracebackhide__ = True
            self._line(text, local_ns or {})

        # Expressions to examine are Python: what is to be expanded, the parser expands.
        @no_var_expand
        def cell(text: str, body: str | None) -> object:
            __tracebackhide__ = True
            if body is None:  # as `MagicLines` writes it: the body is the rest of the running cell
                self._open(text, self._screen.shell.user_ns, subjects=False)
                return None
            # Reached by code that calls run_cell_magic itself, as a notebook exported to a script does.
            return self._homes.cells.run_as_cell(f"%%{self.row.name} {text}\n{body}")

        line.__doc__ = cell.__doc__ = self.parser.help
        line.__name__ = cell.__name__ = self.row.name
        return line, cell

    def _line(self, text: str, local_ns: dict[str, object]) -> None:
        __tracebackhide__ = True
        names = ChainMap(local_ns, self._screen.shell.user_ns)  # a copy would hold all of it
        asked = self.parser.parse(text, subjects=True, names=names)
        if asked.help:
            self._open(text, names, subjects=True)
        elif asked.word == "off":
            self._homes.lasting.off(self.row.name)
        elif asked.word == "on" or (asked.word is None and self.row.line_lasts):
            with _in_one_line():
                self._homes.lasting.on(self.row.name, self._shown(asked, lasting=True))
        elif asked.word is not None:
            self._show(asked, Examined(self.row.report_of_word(asked.word, self._homes.lasting.live(self.row.name))))
        elif asked.subjects or self.row.probe is None:
            subjects, keywords = self._evaluated(asked.subjects, local_ns)
            try:
                with _in_one_line(), watched_work(self.row, self._screen, is_quiet=asked.quiet) as progress:
                    examined = self.row.report_on(subjects, keywords, asked.options, asked.subjects, progress)
            except BaseException as error:
                self._shorten(error, asked, is_folded=False)
                raise
            self._show(asked, examined)
        elif (report := self._of_failed_cell(asked)) is not None:
            self._show(asked, Examined(report))
        else:
            self._open(text, names, subjects=True, after=self._last_error())

    def _evaluated(self, sources: tuple[str, ...], local_ns: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Evaluate the expressions as arguments of a call."""
        values, named = evaluated(sources, self._screen.shell.user_ns, local_ns, self.row.subject_of)
        if named and not self.row.takes_keywords:
            msg = f"%{self.row.name} takes no named value such as {next(iter(named))}=..."
            raise UsageError(msg)
        return values, named

    def _of_failed_cell(self, asked: Arguments) -> Report | None:
        """The report on the error that ended the previous cell, or None."""
        error = self._last_error()
        return None if error is None else self.row.report_after(error, asked.options)

    def _last_error(self) -> BaseException | None:
        last = self._screen.shell.last_execution_result
        return None if last is None else last.error_in_exec

    def _show(self, asked: Arguments, examined: Examined) -> None:
        __tracebackhide__ = True
        below: tuple[Fold, ...] = ()
        if examined.error is not None:
            self._shorten(examined.error, asked, is_folded=examined.report is not None)
            below = folded(examined.error)
        if examined.report is not None:
            Delivery(self.row, asked, self._screen, lambda name, kept: self._keep(name, kept, None))(examined.report, below=below)
        if examined.error is not None:
            raise examined.error

    def _shorten(self, error: BaseException, asked: Arguments, *, is_folded: bool) -> None:
        """Show the error by the user's own calls, or whole where no report is shown: between them and the cell are ours."""
        if not isinstance(error, (UsageError, TorchDebugError)):
            self._homes.cells.shorten(error, [] if asked.quiet else self.row.traceback_of(error, is_folded=is_folded))

    def _open(self, text: str, names: Mapping[str, object], *, subjects: bool, after: BaseException | None = None) -> None:
        __tracebackhide__ = True
        asked = self.parser.parse(text, subjects=subjects, names=names)
        if asked.help:
            self._screen.say(self.parser.help)
            return
        if self.row.probe is None:
            msg = f"%{self.row.name} stands on a line of its own: it watches no cell"
            raise UsageError(msg)
        with _in_one_line():
            self._homes.cells.open(self.row.name, self._shown(asked, after=after))

    def _shown(self, asked: Arguments, *, lasting: bool = False, after: BaseException | None = None) -> ShownSession:
        __tracebackhide__ = True
        runs = self._homes.reruns.of_running_cell(self.row.name) if self.row.reruns else None
        body = None if lasting or not self.row.runs_again else CellBody(self._screen.shell, self._homes.cells, self._names)
        session = self.row.session_of_cell(asked.options, runs=runs, after=after, body=body, kept=bool(asked.output))
        deliver = Delivery(self.row, asked, self._screen, lambda name, report: self._keep(name, report, session))
        return ShownSession(session, deliver, self._recorder, lasting=lasting)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise a `TorchDebugError` as IPython's own one-line `UsageError`."""
    __tracebackhide__ = True
    try:
        yield
    except TorchDebugError as error:
        raise UsageError(str(error)) from None
