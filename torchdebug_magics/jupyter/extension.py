"""Everything that ``%load_ext`` adds to one shell and ``%unload_ext`` removes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from torchdebug_magics import catalog
from torchdebug_magics.errors import NonFiniteError, TorchDebugError
from torchdebug_magics.fixes import changes, fixed_source
from torchdebug_magics.html.page import Block, Facts, Note, Page, Table
from torchdebug_magics.instrument import Instrument
from torchdebug_magics.jupyter.arguments import without_comment
from torchdebug_magics.jupyter.cell import MagicLines, on_event
from torchdebug_magics.jupyter.magics import EveryCell, Home, InstrumentMagic
from torchdebug_magics.jupyter.showing import MODES, show_reports
from torchdebug_magics.machine import gpus
from torchdebug_magics.machine.kept_files import abandoned_copies
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell


_PACKAGE = "torchdebug_magics"
"""Imports this module, which must not import it."""
_KEY = "TorchDebug"
# By mode where it decides alone, else by the kind of the live view.
_SHOWN = {
    "text": "as text, at the cell's end",
    "frozen": "as HTML, at the cell's end",
    "widget": "as interactive widgets",
    "widgets": "live in a widget while a cell runs, then as HTML that stays",
    "html": "live as HTML while a cell runs, then as HTML that stays",
}
_TABLE = "_filename_map"
"""Attribute of IPython 8's compiler; created here where it is missing."""
_MAGIC_LINE = re.compile(r"\s*%%?(\w+)\s(?:.*\s)?(\S*)$")


class Extension(Home):
    """The magics, the transformer, the events, the formatters and the completer of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._undo = ExitStack()

    def install(self) -> None:
        """Add everything to the shell."""
        shell, stack = self.shell, self._undo
        magics = {row.name: (FrontDoor if row.name == FrontDoor.NAME else InstrumentMagic)(row, self) for row in catalog.instruments()}
        # What is added last is removed first.
        stack.callback(shell.magics_manager.registry.pop, _KEY)
        shell.magics_manager.registry[_KEY] = self
        register: Any = shell.register_magic_function
        for name, magic in magics.items():
            for kind, function in zip(("line", "cell"), magic.functions(), strict=True):
                register(function, kind, name)
        for kinds in shell.magics_manager.magics.values():
            for name in magics:
                stack.callback(kinds.pop, name, None)
        takes_values = {name for name, magic in magics.items() if magic.row.subjects}
        complete(shell, {name: magic.completions for name, magic in magics.items()}, takes_values, stack)
        show_reports(self.screen, stack)
        lines = MagicLines(magics)
        shell.input_transformers_cleanup.append(lines)
        stack.callback(shell.input_transformers_cleanup.remove, lines)
        note_cell_numbers(shell, stack)
        self.lasting.install(shell, stack)
        self.cells.install(stack)
        for words in (self.recorder.last_words(), _lost_files()):
            if words:
                self.screen.say(words)

    def uninstall(self) -> None:
        """Remove everything; open sessions are closed and show their reports."""
        self._undo.close()


def _lost_files() -> str:
    """What a kernel that was killed in the middle of a rerun has not put back."""
    copies = abandoned_copies()
    if not copies:
        return ""
    folders = " ".join(shlex.quote(folder) for folder in sorted({str(Path(path).parent) for path in copies}))
    copying = "; ".join((f"mkdir -p {folders}", *(f"cp {shlex.quote(copy)} {shlex.quote(path)}" for path, copy in copies.items())))
    removing = " ".join(shlex.quote(folder) for folder in sorted({str(Path(copy).parent) for copy in copies.values()}))
    return (
        f"a kernel was killed while a magic ran code again, and files are not as your code left them. To put them back: {copying}. "
        f"To leave them and hear no more of it: rm -r {removing}"
    )


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, unless this shell has them: ``%load_ext torchdebug_magics``."""
    if loaded(shell) is None:
        Extension(shell).install()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics: ``%unload_ext torchdebug_magics``."""
    extension = loaded(shell)
    if extension is not None:
        extension.uninstall()


def last_session() -> Session[Any] | None:
    """The session of the latest cell under a magic, or None: ``last_session().bad`` holds the tensors at its finding.

    Only the latest is kept, until the next one ends; it pins those tensors.
    """
    extension = loaded(get_ipython())
    return None if extension is None else extension.last_session


def show(report: Report, *, widget: bool = False) -> None:
    """Show a report again, as its magic does; with `widget`, as an interactive view: filter, sort, expand.

    It is printed where no shell has loaded the extension.
    """
    extension = loaded(get_ipython())
    row = catalog.instrument_of(report)
    if row is None:
        print(report)  # noqa: T201 - a script has no other screen
    elif extension is not None:
        extension.screen.show(report, row, widget=widget)
    else:
        from torchdebug_magics.html import plain  # noqa: PLC0415 - nothing is shown when the extension is loaded

        print(plain.render(row.page(report)))  # noqa: T201 - a script has no other screen


def loaded(shell: InteractiveShell | None) -> Extension | None:
    """The shell's extension object; it is stored with the shell's magics, not in a global."""
    found = None if shell is None else shell.magics_manager.registry.get(_KEY)
    return found if isinstance(found, Extension) else None


class FrontDoor(InstrumentMagic):
    """``%%torchdebug``, and the words of its line."""

    NAME = "torchdebug"

    def __init__(self, row: Instrument, home: Home) -> None:
        super().__init__(row, home)
        self._rows = tuple(catalog.instruments())
        self._reports = home.reports
        self._acts: Mapping[str, Callable[[], None]] = {
            "on": lambda: home.lasting.on(self.NAME, EveryCell(self, home.screen)),
            "off": lambda: home.lasting.off(self.NAME),
            "doctor": lambda: home.screen.show_page(self.doctor()),
            "last": self._last,
            "fix": lambda: home.screen.say(self._fix()),
            "display": lambda: home.screen.say(self._display()),
        }
        self.completions = (*self._acts, *MODES, *self.completions)

    def line(self, text: str, local_ns: dict[str, object]) -> None:
        """Run one line."""
        __tracebackhide__ = True
        words = without_comment(text).split()
        match words:
            case ["display", mode] if mode in MODES:
                self._screen.mode = mode
                words.pop()
        if len(words) == 1 and words[0] in self._acts:
            self._acts[words[0]]()
        elif words and not words[0].startswith("-"):
            msg = f"%torchdebug has {', '.join(self._acts)} and display {'|'.join(MODES)}: what is {without_comment(text)!r}?"
            raise UsageError(msg)
        elif words or (self.last_error() is not None and not self._is_explained()):
            super().line(text, local_ns)
        elif self.last_error() is not None:
            self._last()
        else:
            self._screen.show_page(self.welcome())

    def _last(self) -> None:
        if not self._reports:
            self._screen.say("there is no report yet")
            return
        name, report = self._reports[-1]
        row = next((row for row in self._rows if row.name == name), None) or catalog.instrument_of(report)
        if row is not None:
            self._screen.show(report, row)

    def _is_explained(self) -> bool:
        """Whether the last report is on the error that ended the last cell."""
        source = str(getattr(getattr(self.last_result, "info", None), "raw_cell", ""))
        return bool(self._reports) and (source.startswith(f"%%{self.NAME}") or isinstance(self.last_error(), NonFiniteError))

    def welcome(self) -> Page:
        """All magics, and a summary of this machine."""
        kinds = ("Magics above a cell", lambda row: row.watches), ("Magics on a line", lambda row: not row.watches)
        listed = ((title, tuple((row.magic, row.summary) for row in self._rows if is_of_kind(row))) for title, is_of_kind in kinds)
        magics = (Table(title, ("magic", "shows"), rows, {"shows": "prose"}) for title, rows in listed if rows)
        first = self._rows[0].name if self._rows else "NAME"
        more = Note(f"A question mark shows the help: `%%{first}?`, `%torchdebug?`.")
        verdict = f"{_PACKAGE} {vars(sys.modules[_PACKAGE])['__version__']} is ready: write `%%{first}` as the first line of a cell"
        return Page("torchdebug", "info", verdict, (*magics, more, *self._state()))

    def doctor(self) -> Page:
        """Versions, device, memory limit, display mode and the last verdicts."""
        return Page(
            "torchdebug",
            "info",
            f"{_PACKAGE} {vars(sys.modules[_PACKAGE])['__version__']}, and what it finds on this machine",
            self._state(),
        )

    def _state(self) -> tuple[Block, ...]:
        facts = (("versions", gpus.versions()), ("device", gpus.device()), ("memory", gpus.memory_limit()), ("display", self._display()))
        if not self._reports:
            return (Facts(facts),)
        magics = {row.name: row.magic for row in self._rows}
        latest = tuple((magics.get(name, name), report.verdict) for name, report in reversed(self._reports))
        return (Facts(facts), Table("Last reports", ("magic", "verdict"), latest, {"verdict": "prose"}))

    def _display(self) -> str:
        how = _SHOWN["text"] if self._screen.kind == "text" else _SHOWN.get(self._screen.mode) or _SHOWN[self._screen.kind]
        return f"reports are shown {how} (`%torchdebug display {self._screen.mode}`)"

    def _fix(self) -> str:
        """The fix of the last report, applied: a cell as the next input, a file as a diff. What changed, in words."""
        if not self._reports:
            return "there is no report yet: run a cell under a magic first"
        _, report = self._reports[-1]
        try:
            sources = fixed_source(report)
        except TorchDebugError as error:
            return str(error)
        cells = [(place, source) for place, source in sources.items() if isinstance(place, int)]
        for _, source in cells[:1]:
            self._screen.shell.set_next_input(source)
        if cells and len(sources) == 1:
            state = "run again with it, the fault was gone" if report.fix_state == "verified" else "it compiles, and was not run"
            lines = [f"line {edit.line}: `{edit.new}`" for edit in report.edits]
            return f"the cell below is In[{cells[0][0]}] with the fix ({state}): {'; '.join(lines)}"
        return changes(report)


def note_cell_numbers(shell: InteractiveShell, stack: ExitStack) -> None:
    """Record the file name of each cell before it runs, where IPython's compiler does not."""
    compiler: Any = shell.compile
    if hasattr(compiler, _TABLE):
        return
    numbers: dict[str, int] = {}

    def before_cell(info: ExecutionInfo) -> None:
        if info.store_history and info.raw_cell:
            number = shell.execution_count
            numbers[compiler.get_code_name(info.raw_cell, info.raw_cell, number)] = number

    setattr(compiler, _TABLE, numbers)
    stack.callback(delattr, compiler, _TABLE)
    on_event(shell, "pre_run_cell", before_cell, stack)


def complete(shell: InteractiveShell, words: Mapping[str, Iterable[str]], takes_values: Collection[str], stack: ExitStack) -> None:
    """Complete flags and words, and behind a magic that takes values variables, where IPython supports matchers (8.6 and later)."""
    try:
        from IPython.core.completer import SimpleCompletion, context_matcher  # noqa: PLC0415 - not in IPython 7
    except ImportError:
        return

    @context_matcher(identifier="torchdebug_magics")
    def matcher(context: CompletionContext) -> Any:
        match = _MAGIC_LINE.match(context.text_until_cursor)
        name, begun = match.groups() if match else ("", "")
        # Where a value may stand, flags are only offered once a dash is there; a word such as `doctor` at once.
        known = [word for word in words.get(name, ()) if word.startswith(begun) and (begun[:1] == "-" or word[0] != "-")]
        if not known and name in takes_values and begun:
            variables = [variable for variable in shell.user_ns if variable not in shell.user_ns_hidden and variable.startswith(begun)]
            known = shell.Completer.attr_matches(begun) if "." in begun else variables
        return {"completions": [SimpleCompletion(text, type="option") for text in known], "suppress": bool(known)}

    shell.Completer.custom_matchers.append(matcher)
    stack.callback(shell.Completer.custom_matchers.remove, matcher)
