"""``%torchdebug``: lists all magics, describes this machine, and chooses how reports are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand

from torchdebug_magics import __version__, catalog
from torchdebug_magics.html.page import Facts, Note, Page, Table
from torchdebug_magics.jupyter.arguments import without_comment
from torchdebug_magics.jupyter.display import MODES, Screen
from torchdebug_magics.machine import summary

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block
    from torchdebug_magics.instrument import Instrument
    from torchdebug_magics.report import Report

__all__ = ["FrontDoor"]

_HELP = """The magics of torchdebug_magics, and this machine.

    %torchdebug                 every magic with one line, and what this machine offers
    %torchdebug doctor          versions, device, memory limit, display, the last verdicts
    %torchdebug last            the last report again; torchdebug_magics.last_session().bad holds its tensors
    %torchdebug display MODE    how reports are shown from now on:
                                auto     live while the cell runs, frozen at its end (as at first)
                                widget   an interactive view is left (as -w does)
                                frozen   no live view
                                text     text alone"""
# By mode where it decides alone, else by the kind of the live view.
_SHOWN = {
    "text": "as text, at the cell's end",
    "frozen": "as HTML, at the cell's end",
    "widget": "as interactive widgets",
    "widgets": "live in a widget while a cell runs, then as HTML that stays",
    "html": "live as HTML while a cell runs, then as HTML that stays",
}


class FrontDoor:
    """The line magic ``%torchdebug``."""

    NAME = "torchdebug"
    HELP = _HELP
    WORDS = ("doctor", "last", "display", *MODES, "--help")

    def __init__(self, rows: Iterable[Instrument], screen: Screen, reports: Sequence[tuple[str, Report]]) -> None:
        self._rows = tuple(rows)
        self._screen = screen
        self._reports = reports

    def function(self) -> Callable[[str], None]:
        """The function to register with IPython."""

        @no_var_expand
        def torchdebug(text: str) -> None:
            __tracebackhide__ = True
            self(text)

        torchdebug.__doc__ = _HELP
        return torchdebug

    def __call__(self, text: str) -> None:
        """Run one line."""
        match without_comment(text).split():
            case []:
                self._screen.show_page(self.welcome())
            case ["doctor"]:
                self._screen.show_page(self.doctor())
            case ["last"]:
                self._last()
            case ["display"]:
                self._screen.say(self._display())
            case ["display", mode] if mode in MODES:
                self._screen.mode = mode
                self._screen.say(self._display())
            case ["-h" | "--help"]:
                self._screen.say(_HELP)
            case _:
                msg = f"%torchdebug has doctor, last and display {'|'.join(MODES)}: what is {without_comment(text)!r}?"
                raise UsageError(msg)

    def welcome(self) -> Page:
        """All magics, and a summary of this machine."""
        kinds = ("Magics above a cell", lambda row: row.probe is not None), ("Magics on a line", lambda row: row.probe is None)
        listed = ((title, tuple((row.magic, row.summary) for row in self._rows if is_of_kind(row))) for title, is_of_kind in kinds)
        magics = (Table(title, ("magic", "shows"), rows, {"shows": "prose"}) for title, rows in listed if rows)
        first = self._rows[0].name if self._rows else "NAME"
        more = Note(f"A question mark shows the help: `%%{first}?`, `%torchdebug?`.")
        verdict = f"torchdebug_magics {__version__} is ready: write `%%{first}` as the first line of a cell"
        return Page("torchdebug", "info", verdict, (*magics, more, *self._state()))

    def doctor(self) -> Page:
        """Versions, device, memory limit, display mode and the last verdicts."""
        return Page("torchdebug", "info", f"torchdebug_magics {__version__}, and what it finds on this machine", self._state())

    def _state(self) -> tuple[Block, ...]:
        facts = (
            ("versions", summary.versions()),
            ("device", summary.device()),
            ("memory", summary.memory_limit()),
            ("display", self._display()),
        )
        if not self._reports:
            return (Facts(facts),)
        magics = {row.name: row.magic for row in self._rows}
        latest = tuple((magics.get(name, name), report.verdict) for name, report in reversed(self._reports))
        return (Facts(facts), Table("Last reports", ("magic", "verdict"), latest, {"verdict": "prose"}))

    def _display(self) -> str:
        how = _SHOWN["text"] if self._screen.kind == "text" else _SHOWN.get(self._screen.mode) or _SHOWN[self._screen.kind]
        return f"reports are shown {how} (`%torchdebug display {self._screen.mode}`)"

    def _last(self) -> None:
        if not self._reports:
            self._screen.say("there is no report yet")
            return
        report = self._reports[-1][1]
        row = next((row for row in self._rows if row.name == self._reports[-1][0]), None) or catalog.instrument_of(report)
        if row is not None:
            self._screen.show(report, row)
