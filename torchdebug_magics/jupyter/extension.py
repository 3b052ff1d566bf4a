"""Everything that ``%load_ext`` adds to one shell and ``%unload_ext`` removes."""

from __future__ import annotations

import shlex
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from torchdebug_magics import catalog
from torchdebug_magics.jupyter.cell import CellSessions
from torchdebug_magics.jupyter.completion import FlagCompleter
from torchdebug_magics.jupyter.display import ReportFormatter, Screen
from torchdebug_magics.jupyter.front_door import FrontDoor
from torchdebug_magics.jupyter.lasting import LastingSessions
from torchdebug_magics.jupyter.magics import Homes, InstrumentMagic
from torchdebug_magics.jupyter.numbers import CellNumbers
from torchdebug_magics.jupyter.reading import MagicLines
from torchdebug_magics.jupyter.recorder import Recorder
from torchdebug_magics.jupyter.reruns import Reruns
from torchdebug_magics.machine.kept_files import abandoned_copies

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.report import Report
    from torchdebug_magics.session import Session

__all__ = ["Extension", "last_session", "load", "loaded", "show", "unload"]

_KEY = "TorchDebug"


class Extension:
    """The magics, the transformer, the events, the formatters and the completer of one shell, and its latest session."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.screen = Screen(shell)
        self.last_session: Session[Any] | None = None
        """The latest session; it pins the tensors that its probe kept for inspection."""
        self.reports: deque[tuple[str, Report]] = deque(maxlen=5)
        """The latest reports, with the names of their magics."""
        self._cells = CellSessions(shell)
        self._numbers = CellNumbers(shell)
        self._lasting = LastingSessions(shell)
        self._recorder = Recorder(shell)
        homes = Homes(self._cells, self._lasting, Reruns())
        self._magics = {row.name: InstrumentMagic(row, homes, self._recorder, self.screen, self._keep) for row in catalog.instruments()}
        self._front_door = FrontDoor([magic.row for magic in self._magics.values()], self.screen, self.reports)
        self._formatter = ReportFormatter(self.screen)
        self._lines = MagicLines(self._magics)
        flags = {name: (*magic.parser.words, *magic.parser.flags) for name, magic in self._magics.items()}
        self._completer = FlagCompleter(shell, {**flags, self._front_door.NAME: self._front_door.WORDS})

    def install(self) -> None:
        """Add everything to the shell."""
        register: Any = self.shell.register_magic_function
        for name, magic in self._magics.items():
            for kind, function in zip(("line", "cell"), magic.functions(), strict=True):
                register(function, kind, name)
        register(self._front_door.function(), "line", self._front_door.NAME)
        self.shell.input_transformers_cleanup.append(self._lines)
        self._cells.install()
        self._lasting.install()
        self._numbers.install()
        self._formatter.install()
        self._completer.install()
        self.shell.magics_manager.registry[_KEY] = self
        for words in (self._recorder.last_words(), _lost_files(abandoned_copies())):
            if words:
                self.screen.say(words)

    def uninstall(self) -> None:
        """Remove everything; open sessions are closed and show their reports."""
        self._cells.uninstall()
        self._lasting.uninstall()
        self._numbers.uninstall()
        self.shell.input_transformers_cleanup.remove(self._lines)
        self._formatter.uninstall()
        self._completer.uninstall()
        for magics in self.shell.magics_manager.magics.values():
            for name in (*self._magics, self._front_door.NAME):
                magics.pop(name, None)
        del self.shell.magics_manager.registry[_KEY]

    def _keep(self, name: str, report: Report, session: Session[Any] | None) -> None:
        self.reports.append((name, report))
        if session is not None:
            self.last_session = session


def _lost_files(copies: dict[str, str]) -> str:
    """What a kernel that was killed in the middle of a rerun has not put back."""
    if not copies:
        return ""
    folders = " ".join(shlex.quote(folder) for folder in sorted({str(Path(path).parent) for path in copies}))
    copying = "; ".join((f"mkdir -p {folders}", *(f"cp {shlex.quote(copy)} {shlex.quote(path)}" for path, copy in copies.items())))
    removing = " ".join(shlex.quote(folder) for folder in sorted({str(Path(copy).parent) for copy in copies.values()}))
    return (
        f"a kernel was killed while a magic ran code again, and files are not as your code left them. To put them back: {copying}. "
        f"To leave them and hear no more of it: rm -r {removing}"
    )


def load(shell: InteractiveShell) -> None:
    """Load the extension, unless this shell already has."""
    if loaded(shell) is None:
        Extension(shell).install()


def unload(shell: InteractiveShell) -> None:
    """Unload the extension."""
    extension = loaded(shell)
    if extension is not None:
        extension.uninstall()


def last_session() -> Session[Any] | None:
    """The latest session of the running shell, or None."""
    shell = get_ipython()
    extension = None if shell is None else loaded(shell)
    return None if extension is None else extension.last_session


def show(report: Report, *, widget: bool = False) -> None:
    """Show a report as its magic does; print it where no shell has loaded the extension."""
    shell = get_ipython()
    extension = None if shell is None else loaded(shell)
    row = catalog.instrument_of(report)
    if row is None:
        print(report)  # noqa: T201 - a script has no other screen
    elif extension is not None:
        extension.screen.show(report, row, widget=widget)
    else:
        from torchdebug_magics.html import plain  # noqa: PLC0415 - nothing is shown when the extension is loaded

        print(plain.render(row.page(report)))  # noqa: T201 - a script has no other screen


def loaded(shell: InteractiveShell) -> Extension | None:
    """The shell's extension object; it is stored with the shell's magics, not in a global."""
    found = shell.magics_manager.registry.get(_KEY)
    return found if isinstance(found, Extension) else None
