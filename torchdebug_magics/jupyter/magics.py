"""The magics of the instruments, made from the rows of the catalog."""

from __future__ import annotations

import ast
import re
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any, Self, TypeAlias

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from IPython.core.magic import needs_local_scope, no_var_expand
from IPython.utils.capture import capture_output

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html.page import Fold
from torchdebug_magics.instrument import Body, CellContext, Instrument
from torchdebug_magics.jupyter.arguments import Arguments, MagicParser, evaluated
from torchdebug_magics.jupyter.cell import CellSessions, on_event, running_cells
from torchdebug_magics.jupyter.recorder import Recorder
from torchdebug_magics.jupyter.showing import Delivery, Screen, ShownSession, folded, watched_work
from torchdebug_magics.report import Report
from torchdebug_magics.session import Session

Memories: TypeAlias = Callable[[str, str], "deque[Any]"]
_RUN_CODE = InteractiveShell.run_code.__code__
_OF_PYTHON = frozenset({"time", "capture", "prun"})
"""Cell magics that run the code below them unchanged, once."""
_SHELL_COMMANDS = frozenset({"system", "getoutput"})
_CELLS = 32
_RUNS = 5
"""Runs remembered for each cell."""


class Home:
    """What the magics of one shell share, and what they have found last."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.screen = Screen(shell)
        self.cells = CellSessions(shell)
        self.lasting = LastingSessions()
        self.memories = memories()
        self.recorder = Recorder(shell)
        self.last_session: Session[Any] | None = None
        """The latest session; it pins the tensors that its probe kept for inspection."""
        self.reports: deque[tuple[str, Report]] = deque(maxlen=5)
        """The latest reports, with the names of their magics."""

    def keep(self, name: str, report: Report, session: Session[Any] | None = None) -> None:
        """Remember a report, and its session if there was one."""
        self.reports.append((name, report))
        self.last_session = session or self.last_session


class InstrumentMagic:
    """``%%name`` around a cell, ``%name`` to its end, ``%name on`` until ``%name off``, ``%name VALUE`` to examine a value."""

    def __init__(self, row: Instrument, home: Home) -> None:
        self.row = row
        self.parser = MagicParser(row)
        self.completions = (*self.parser.words, *self.parser.flags)
        self._home = home
        self._screen = home.screen

    def functions(self) -> tuple[Callable[..., object], Callable[..., object]]:
        """The function to register with IPython, for line and cell form."""

        @no_var_expand
        @needs_local_scope
        def line(text: str, local_ns: dict[str, object] | None = None) -> None:
            __tracebackhide__ = True
            self.line(text, local_ns or {})

        # Expressions to examine are Python: what is to be expanded, the parser expands.
        @no_var_expand
        def cell(text: str, body: str | None) -> object:
            __tracebackhide__ = True
            if body is None:  # as `MagicLines` writes it: the body is the rest of the running cell
                self._open(text, self._screen.shell.user_ns, subjects=False)
                return None
            # Reached by code that calls run_cell_magic itself, as a notebook exported to a script does.
            return self._home.cells.run_source(f"%%{self.row.name} {text}\n{body}")

        line.__doc__ = cell.__doc__ = self.parser.help
        line.__name__ = cell.__name__ = self.row.name
        return line, cell

    def line(self, text: str, local_ns: dict[str, object]) -> None:
        """Run one line."""
        __tracebackhide__ = True
        names = ChainMap(local_ns, self._screen.shell.user_ns)  # a copy would hold all of it
        asked = self.parser.parse(text, subjects=True, names=names)
        if asked.help:
            self._open(text, names, subjects=True)
        elif asked.word == "off":
            self._home.lasting.off(self.row.name)
        elif asked.word == "on" or (self.row.lasting == "line" and not asked.subjects):
            with _in_one_line():
                self._home.lasting.on(self.row.name, self._shown(asked, lasting=True))
        elif not (self.row.examines and self._examine(asked, local_ns)):
            self._open(text, names, subjects=True, after=self.last_error())

    def _examine(self, asked: Arguments, local_ns: dict[str, object]) -> bool:
        """Whether the line was examined: a bare one of a magic that watches cells may have nothing to report."""
        __tracebackhide__ = True
        subjects, keywords = evaluated(asked.subjects, self._screen.shell.user_ns, local_ns, self.row.subject_of)
        if keywords and not self.row.takes_keywords:
            msg = f"%{self.row.name} takes no named value such as {next(iter(keywords))}=..."
            raise UsageError(msg)
        try:
            with _in_one_line(), watched_work(self.row, self._screen, is_quiet=asked.quiet) as progress:
                context = CellContext(
                    names=asked.subjects,
                    keywords=keywords,
                    last_error=self.last_error() if self.row.watches and not asked.subjects else None,
                    live=self._home.lasting.live(self.row.name),
                    progress=progress,
                )
                examined = self.row.examined(subjects, asked.options, context)
        except BaseException as error:
            self._shorten(error, asked, is_folded=False)
            raise
        if not asked.subjects and examined.report is None and self.row.watches:
            return False
        below: tuple[Fold, ...] = ()
        if examined.error is not None:
            self._shorten(examined.error, asked, is_folded=examined.report is not None)
            below = folded(examined.error)
        if examined.report is not None:
            Delivery(self.row, asked, self._screen, self._home.keep)(examined.report, below=below)
        if examined.error is not None:
            raise examined.error
        return True

    def last_error(self) -> BaseException | None:
        """What ended the previous cell, if not its own end."""
        last = self.last_result
        return None if last is None else last.error_in_exec

    @property
    def last_result(self) -> ExecutionResult | None:
        """How the previous cell ended."""
        return self._home.cells.last_result or self._screen.shell.last_execution_result

    def _shorten(self, error: BaseException, asked: Arguments, *, is_folded: bool) -> None:
        """Show the error by the user's own calls, or whole where no report is shown: between them and the cell are ours."""
        if not isinstance(error, (UsageError, TorchDebugError)):
            self._home.cells.shorten(error, [] if asked.quiet else self.row.traceback_of(error, is_folded=is_folded))

    def _open(self, text: str, names: Mapping[str, object], *, subjects: bool, after: BaseException | None = None) -> None:
        __tracebackhide__ = True
        asked = self.parser.parse(text, subjects=subjects, names=names)
        if asked.help:
            self._screen.say(self.parser.help)
            return
        if not self.row.watches:
            msg = f"%{self.row.name} stands on a line of its own: it watches no cell"
            raise UsageError(msg)
        with _in_one_line():
            self._home.cells.open(self.row.name, self._shown(asked, after=after))

    def open_in_cell(self) -> None:
        """Watch the running cell, and show only what is found."""
        self._home.cells.open(self.row.name, self._shown(self.parser.parse("", subjects=False, names={}), only_findings=True))

    def _shown(
        self, asked: Arguments, *, lasting: bool = False, after: BaseException | None = None, only_findings: bool = False
    ) -> ShownSession:
        __tracebackhide__ = True
        context = _MagicContext(last_error=after, keeps_output=bool(asked.output), home=self._home, name=self.row.name, is_lasting=lasting)
        session = self.row.session_of_cell(asked.options, context)
        deliver = Delivery(
            self.row, asked, self._screen, lambda name, report: self._home.keep(name, report, session), only_findings=only_findings
        )
        return ShownSession(session, deliver, self._home.recorder, lasting=lasting)


@dataclass(frozen=True, kw_only=True)
class _MagicContext(CellContext):
    """Reads the running cell where the probe asks for it."""

    home: Home
    name: str
    is_lasting: bool

    def of(self, name: str) -> _MagicContext:
        return replace(self, name=name)

    def body(self) -> CellBody | None:
        return None if self.is_lasting else CellBody(self.home.screen.shell, self.home.cells)

    def file(self) -> str:
        return _file_of(self.home.screen.shell)

    def unshown(self) -> AbstractContextManager[object]:
        return capture_output(stdout=False, stderr=False)

    def earlier_runs(self) -> deque[Any] | None:
        source = _running_source()
        return None if source is None else self.home.memories(self.name, source)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Raise a `TorchDebugError` as IPython's own one-line `UsageError`."""
    __tracebackhide__ = True
    try:
        yield
    except TorchDebugError as error:
        raise UsageError(str(error)) from None


class CellBody(Body):
    """The code after this package's leading magics; `run` may be called any number of times."""

    def __init__(self, shell: InteractiveShell, cells: CellSessions) -> None:
        source = _running_source()
        if source is None:
            msg = "only a cell can be run a second time: in code, `torchdebug_magics.verify(function)` does it"
            raise UsageError(msg)
        self.namespace = shell.user_ns
        self.hidden = frozenset(shell.user_ns_hidden)
        self.roots = ()
        self._cells = cells
        lines = shell.transform_cell(source)
        compiler: Any = shell.compile
        self.file = _file_of(shell)
        body = compiler.ast_parse(lines, filename=self.file).body
        self.statements = tuple(part for part in body if _cell_magic(part) not in {(row.name, None) for row in catalog.instruments()})
        named = {node.id for statement in self.statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
        self.variables = {name: value for name, value in shell.user_ns.items() if name in named - self.hidden}
        self.refusal = _refusal(self.statements)
        self._code: CodeType | None = (
            None if self.refusal else compiler(shell.transform_ast(ast.Module([*self.statements], [])), self.file, "exec")
        )

    def left(self) -> dict[str, object]:
        """The user's namespace."""
        return {name: value for name, value in self.namespace.items() if name not in self.hidden}

    def run(self) -> None:
        """Run the body again: its exceptions propagate, and nothing is displayed; the caller silences its streams."""
        __tracebackhide__ = True
        code = self._code
        assert code is not None
        with capture_output(stdout=False, stderr=False):
            self._cells.run_as_cell(lambda: exec(code, self.namespace))  # noqa: S102 - the user's own cell


def _file_of(shell: InteractiveShell) -> str:
    """The file name under which IPython compiled the running cell, so that line numbers agree."""
    file = ""
    frame = sys._getframe()  # noqa: SLF001 - the only door to the callers
    while frame is not None and frame.f_code is not _RUN_CODE:
        if frame.f_globals is shell.user_ns:
            file = frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]  # it begins with a frame and may end with None
    return file


def _running_source() -> str | None:
    source = getattr(getattr(next(running_cells(), None), "info", None), "raw_cell", None)
    return source if isinstance(source, str) else None


def _cell_magic(statement: ast.stmt) -> tuple[str, str | None]:
    """Name and body of ``get_ipython().run_cell_magic('time', '', 'x = 1')``; where `MagicLines` wrote it, the body is None."""
    match statement:
        case ast.Expr(
            ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), "run_cell_magic"), [ast.Constant(name), _, ast.Constant(body)])
        ):
            return str(name), None if body is None else str(body)
    return "", ""


def _refusal(statements: Sequence[ast.stmt]) -> str:
    """The reason why the body cannot be rerun, as where another cell magic runs it; empty if it can."""
    for name, body in map(_cell_magic, statements):
        ours = next((row.name for row in catalog.instruments() if f"%%{row.name}" in (body or "").split()), None)
        if ours is not None:
            return f"`%%{name}` is above it: write `%%{ours}` first"
        if name and body is not None and name not in _OF_PYTHON:
            return f"`%%{name}` runs the body, and would run it again"
    for node in (node for statement in statements for node in _outside_functions(statement)):
        match node:
            case ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                return "the cell awaits at top level"
            case ast.Call(ast.Attribute(ast.Call(ast.Name("get_ipython")), name)) if name in _SHELL_COMMANDS:
                return "the cell runs a shell command, which a second run would repeat"
    return ""


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


class LastingSessions:
    """Lasting sessions, at most one for each magic; after each cell, a session may show a page."""

    def __init__(self) -> None:
        self._on: dict[str, ShownSession | EveryCell] = {}

    def install(self, shell: InteractiveShell, stack: ExitStack) -> None:
        """Show pages after each cell, and exit all sessions when the stack closes."""

        def after_cell(*_: object) -> None:
            for session in tuple(self._on.values()):
                session.after_cell()

        def off() -> None:
            for name in reversed(tuple(self._on)):
                self.off(name)

        on_event(shell, "post_run_cell", after_cell, stack)
        stack.callback(off)

    def on(self, name: str, session: ShownSession | EveryCell) -> None:
        """Enter `session`, until `off`."""
        __tracebackhide__ = True
        if name in self._on:
            msg = f"%{name} is on already: `%{name} off` ends it"
            raise UsageError(msg)
        self._on[name] = session  # first, so that an interrupt cannot lose it
        try:
            session.__enter__()
        except BaseException:
            self.off(name)
            raise

    def off(self, name: str) -> None:
        """Exit the session, which shows its report."""
        __tracebackhide__ = True
        session = self._on.get(name)
        if session is None:
            msg = f"%{name} is not on: `%{name} on` begins"
            raise UsageError(msg)
        session.__exit__(None, None, None)
        del self._on[name]  # last: what an interrupt cut short is finished by another `off`

    def live(self, name: str) -> object | None:
        """A snapshot of the open session, or None."""
        return self._on[name].live() if name in self._on else None


class EveryCell:
    """A lasting session: it opens one of `magic` in each cell that has no magic of ours, once torch is imported."""

    def __init__(self, magic: InstrumentMagic, screen: Screen) -> None:
        self._magic = magic
        self._ours = re.compile(rf"^\s*%%?({'|'.join(row.name for row in catalog.instruments())})\b", re.MULTILINE)
        self._screen = screen
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        on_event(self._screen.shell, "pre_run_cell", self._before_cell, self._stack)
        self._screen.say(f"every cell is watched from now on, until `%{self._magic.row.name} off`; only what is found is shown")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._screen.say(f"cells are no longer watched: `%{self._magic.row.name} on` watches them again")

    def live(self) -> None:
        """It has nothing to show but the reports of the cells."""

    after_cell = live

    def _before_cell(self, info: ExecutionInfo) -> None:
        source, is_outermost = info.raw_cell or "", len([*running_cells()]) == 1
        if "torch" in sys.modules and is_outermost and source.strip() and self._ours.search(source) is None:
            try:
                self._magic.open_in_cell()
            except Exception as failure:  # noqa: BLE001 - a failure of ours is one line, and none of the cell's
                self._screen.say(f"(this cell is not watched: {type(failure).__name__}: {failure})")


def memories() -> Memories:
    """Memories of the latest cells, by a magic's name and the cell's text, as a rerun cell has a new number."""
    return lru_cache(_CELLS)(lambda _name, _source: deque(maxlen=_RUNS))
