"""Sessions owned by the running cell: they close when that cell ends, however it ends."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from types import FrameType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import cell_magic, leading_indent
from IPython.core.interactiveshell import ExecutionResult

from torchdebug_magics.jupyter.arguments import without_comment
from torchdebug_magics.jupyter.showing import ShownSession
from torchdebug_magics.session import without_ours

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


# IPython's runner and ours; each holds, in a local called `result`, what its cell will result in.
_RUNNERS = ("run_cell_async", "run_as_cell")
_MAGIC = re.compile(r"%%\s*(\S+)(.*)", re.DOTALL)
_CALL = re.compile(r"get_ipython\(\)\.run_cell_magic\((.*), None\)\n")


def running_cells() -> Iterator[ExecutionResult]:
    """The results of the cells running in this thread, innermost first.

    Read from the frames: ``displayhook.exec_result`` is lost as soon as a nested ``run_cell`` ends.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only door to the callers
    while frame is not None:
        if frame.f_code.co_name in _RUNNERS and isinstance(result := frame.f_locals.get("result"), ExecutionResult):
            yield result
        frame = frame.f_back


def on_event(shell: InteractiveShell, event: str, function: Callable[..., None], stack: ExitStack) -> None:
    """Call `function` at an event of IPython's, until the stack closes."""
    shell.events.register(event, function)
    stack.callback(shell.events.unregister, event, function)  # the same object: each access to a method makes another one


@dataclass(eq=False)
class _Opened:
    name: str
    cell: ExecutionResult
    thread: int
    session: ShownSession
    is_closing: bool = False


class CellSessions:
    """The open sessions of one shell's cells. A session may be exited twice."""

    EVENTS = ("pre_execute", "post_execute", "post_run_cell")
    """Events after which ended sessions are closed: after an interrupt, or a silent run, only some of them fire."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._opened: list[_Opened] = []
        self._handler = self._show  # kept, so that it can be recognised
        self._handler_before: tuple[Any, Any] | None = None
        """The shell's handler of exceptions, called before a traceback is drawn, while ours stands there."""
        self.last_result: ExecutionResult | None = None
        """Of the last cell; a front end that asks for something in between, silently, runs no cell."""
        self._explained: tuple[BaseException, list[str]] | None = None
        """An error of a line magic, and the lines shown in place of its traceback."""

    def install(self, stack: ExitStack) -> None:
        """Close sessions at the end of each cell, and all of them when the stack closes."""
        for event in self.EVENTS:
            on_event(self._shell, event, self._close_ended, stack)
        on_event(self._shell, "post_run_cell", lambda result: setattr(self, "last_result", result), stack)
        stack.callback(self._close, self._opened)

    def open(self, name: str, session: ShownSession) -> None:
        """Enter `session` until the end of the running cell."""
        __tracebackhide__ = True
        cell = next(running_cells(), None)
        if cell is None:
            msg = f"%{name} works in a cell"
            raise UsageError(msg)
        if any(one.name == name and one.cell is cell for one in self._opened):
            msg = f"%{name} is open in this cell already"
            raise UsageError(msg)
        self._opened.append(_Opened(name, cell, get_ident(), session))  # first, so that an interrupt cannot lose it
        self._handle_errors()
        session.__enter__()

    def shorten(self, error: BaseException, lines: list[str]) -> None:
        """Let an error that is about to end the running cell be shown as `lines`; without any, whole but for our frames."""
        self._explained = error, lines
        self._handle_errors()

    def run_source(self, source: str) -> object:
        """Run `source`, including magic lines, outside a cell of its own, and return its last value."""
        __tracebackhide__ = True
        code = self._shell.transform_cell(source)
        compiler = self._shell.compile
        file, space = compiler.cache(code), self._shell.user_ns

        def run() -> object:
            __tracebackhide__ = True
            body = compiler.ast_parse(code, filename=file).body
            last = compiler(ast.Expression(body.pop().value), file, "eval") if isinstance(body[-1], ast.Expr) else "None"
            exec(compiler(ast.Module(body, []), file, "exec"), space)  # noqa: S102 - the user's own cell
            return eval(last, space)  # noqa: S307 - the user's own cell

        return self.run_as_cell(run, source)

    def run_as_cell(self, run: Callable[[], object], source: str | None = None) -> object:
        """Call `run` as a cell of its own; errors of its sessions are not shown."""
        __tracebackhide__ = True
        result = ExecutionResult(SimpleNamespace(raw_cell=source))  # of IPython's own, each version has another form
        value = None
        try:
            value = run()
        except BaseException as error:
            result.error_in_exec = error
            raise
        finally:
            self._close([one for one in self._opened if one.cell is result], show=False)
        result.raise_error()
        return value

    def _close_ended(self, *_: object) -> None:
        running = {id(cell) for cell in running_cells()}
        self._close([one for one in self._opened if one.thread == get_ident() and not one.is_closing and id(one.cell) not in running])

    def _close(self, opened: Sequence[_Opened], *, show: bool = True) -> None:
        for one in reversed(tuple(opened)):
            error = one.cell.error_before_exec if one.cell.error_before_exec is not None else one.cell.error_in_exec
            one.is_closing = True  # a session that runs the cell again may end other cells meanwhile, as those of `%%capture`
            try:
                one.session.__exit__(None if error is None else type(error), error, getattr(error, "__traceback__", None))
            except BaseException as failure:  # noqa: BLE001 - an interrupt too; it fails the cell below
                if error is not None:
                    sys.stderr.write(f"%%{one.name}: {type(failure).__name__}: {failure}\n")  # the user's own error stays the cell's
                else:
                    one.cell.error_in_exec = failure
                    if show:
                        self._show(type(failure), failure, None)
                if isinstance(failure, KeyboardInterrupt):
                    one.is_closing = False
                    continue  # what it cut short is finished at the next event
            self._opened.remove(one)
        if not self._opened:
            self._explained = None
            if self._handler_before is not None and self._shell.CustomTB is self._handler:  # else another one was installed since
                self._shell.custom_exceptions, self._shell.CustomTB = self._handler_before
            self._handler_before = None

    def _handle_errors(self) -> None:
        if self._handler_before is None:
            self._handler_before = self._shell.custom_exceptions, self._shell.CustomTB
            self._shell.custom_exceptions, self._shell.CustomTB = (Exception, KeyboardInterrupt), self._handler

    def _show(self, kind: type[BaseException], error: Any, _trace: TracebackType | None, tb_offset: int | None = None) -> Any:
        without_ours(error)
        with lines_as_typed(error):
            if self._explained is not None and self._explained[0] is error:
                lines = self._explained[1]
            else:
                lines = next(filter(None, (opened.session.traceback_of(error) for opened in self._opened)), [])
            handled, handler = self._handler_before or ((), None)
            if not lines and handler is not None and isinstance(error, handled):
                return handler(kind, error, error.__traceback__, tb_offset)
            if lines:
                error._render_traceback_ = lambda: lines  # by this name IPython asks an error how it looks
            try:
                return self._shell.showtraceback((kind, error, error.__traceback__), running_compiled_code=True)
            finally:
                if lines:
                    del error._render_traceback_


class MagicLines:
    """An input transformer for the magics called `names`."""

    has_side_effects = True
    """Makes a terminal's completeness check see ``%%name`` and wait for the body."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __call__(self, lines: list[str]) -> list[str]:
        """Replace each magic line by one line, so that line numbers stay."""
        read: list[str] = []
        found = False
        for at, line in enumerate(lines):
            magic = _MAGIC.match(line)
            name, arguments = (magic[1], magic[2].strip()) if magic else ("", "")
            if name in self._names:
                found = True
                # A body of None says: the body is what follows in this cell.
                read.append(f"get_ipython().run_cell_magic({name!r}, {arguments!r}, None)\n")
                if {"-h", "--help"} & set(without_comment(arguments).split()):
                    return read
            elif line.strip() and not line.startswith("#"):
                # What IPython would do to the body if our lines were not there: another's cell magic, or an indented body.
                return [*read, *cell_magic(leading_indent(lines[at:]))] if found else lines
            else:
                read.append(line)
        return read


@contextmanager
def lines_as_typed(error: BaseException) -> Iterator[None]:
    """While the traceback of `error` is drawn, magic lines read ``# %%name``, not as the calls that `MagicLines` made of them."""
    changed: list[tuple[list[str], list[str]]] = []
    for file in {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}:
        entry = linecache.cache.get(file, ())
        if len(entry) > 2 and isinstance(lines := entry[2], list) and lines and _CALL.fullmatch(lines[0]):  # noqa: PLR2004 - not a lazy one
            changed.append((lines, lines[:]))
            lines[:] = [_as_typed(line) for line in lines]
    try:
        yield
    finally:
        for lines, before in changed:
            lines[:] = before


def _as_typed(line: str) -> str:
    match = _CALL.fullmatch(line)
    if match is None:
        return line
    name, arguments = ast.literal_eval(match[1])
    return f"# %%{name} {arguments}".rstrip() + "\n"
