"""Sessions owned by the running cell: they close when that cell ends, however it ends."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult

from torchdebug_magics.jupyter.plain_tracebacks import PlainTracebacks

if TYPE_CHECKING:
    from types import CodeType

    from IPython.core.interactiveshell import InteractiveShell

    from torchdebug_magics.jupyter.showing import ShownSession

__all__ = ["CellSessions", "running_cells"]

# IPython's runner and ours; each holds, in a local called `result`, what its cell will result in.
_RUNNERS = ("run_cell_async", "run_as_cell", "run_cell_again")


def running_cells() -> Iterator[ExecutionResult]:
    """The results of the cells running in this thread, innermost first.

    Read from the frames: ``displayhook.exec_result`` is lost as soon as a nested ``run_cell`` ends.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only door to the callers
    while frame is not None:
        if frame.f_code.co_name in _RUNNERS and isinstance(result := frame.f_locals.get("result"), ExecutionResult):
            yield result
        frame = frame.f_back


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
        self._shell = shell
        self._opened: list[_Opened] = []
        self._tracebacks = PlainTracebacks(shell, self._traceback_of)
        self._explained: tuple[BaseException, list[str]] | None = None
        """An error of a line magic, and the lines shown in place of its traceback."""
        self._ender = self._close_ended  # kept, as %autoreload would make another one, which could not be unregistered

    def install(self) -> None:
        """Register for the end of each cell."""
        for event in self.EVENTS:
            self._shell.events.register(event, self._ender)

    def uninstall(self) -> None:
        """Close all sessions and unregister."""
        self._close(self._opened)
        for event in self.EVENTS:
            self._shell.events.unregister(event, self._ender)

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
        self._tracebacks.begin()
        session.__enter__()

    def shorten(self, error: BaseException, lines: list[str]) -> None:
        """Let an error that is about to end the running cell be shown as `lines`; without any, whole but for our frames."""
        self._explained = error, lines
        self._tracebacks.begin()

    def run_as_cell(self, source: str) -> object:
        """Run `source`, including magic lines, outside a cell of its own, and return its last value."""
        __tracebackhide__ = True
        result = ExecutionResult(SimpleNamespace(raw_cell=source))  # of IPython's own, each version has another form
        code = self._shell.transform_cell(source)
        value = None
        try:
            value = self._evaluate(code)
        except BaseException as error:
            result.error_in_exec = error
            raise
        finally:
            self._close([one for one in self._opened if one.cell is result], show=False)
        result.raise_error()
        return value

    def run_cell_again(self, code: CodeType) -> None:
        """Run compiled code as a cell of its own; reports of its sessions are not shown."""
        __tracebackhide__ = True
        result = ExecutionResult(None)
        try:
            exec(code, self._shell.user_ns)  # noqa: S102 - the user's own cell
        except BaseException as error:
            result.error_in_exec = error
            raise
        finally:
            self._close([one for one in self._opened if one.cell is result], show=False)

    def _evaluate(self, code: str) -> object:
        __tracebackhide__ = True
        compiler: Any = self._shell.compile
        file, space = compiler.cache(code), self._shell.user_ns
        body = compiler.ast_parse(code, filename=file).body
        last = compiler(ast.Expression(body.pop().value), file, "eval") if isinstance(body[-1], ast.Expr) else "None"
        exec(compiler(ast.Module(body, []), file, "exec"), space)  # noqa: S102 - the user's own cell
        return eval(last, space)  # noqa: S307 - the user's own cell

    def _traceback_of(self, error: BaseException) -> list[str]:
        if self._explained is not None and self._explained[0] is error:
            return self._explained[1]
        return next(filter(None, (one.session.traceback_of(error) for one in self._opened)), [])

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
                        self._tracebacks.show(failure)
                if isinstance(failure, KeyboardInterrupt):
                    one.is_closing = False
                    continue  # what it cut short is finished at the next event
            self._opened.remove(one)
        if not self._opened:
            self._explained = None
            self._tracebacks.end()
