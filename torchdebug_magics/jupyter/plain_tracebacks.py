"""Tracebacks of cells with an open session: as without it, or shortened where the report explains the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchdebug_magics.jupyter.reading import lines_as_typed
from torchdebug_magics.tracebacks import without_ours

if TYPE_CHECKING:
    from types import TracebackType

    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["PlainTracebacks"]


class PlainTracebacks:
    """Installed as the shell's custom exception handler, which runs before a traceback is drawn."""

    def __init__(self, shell: InteractiveShell, traceback_of: Callable[[BaseException], list[str]]) -> None:
        self._shell: Any = shell
        self._traceback_of = traceback_of
        self._before: tuple[Any, Any] | None = None
        self._handler = self._show  # kept, so that it can be recognised

    def begin(self) -> None:
        """Install; idempotent."""
        if self._before is None:
            self._before = self._shell.custom_exceptions, self._shell.CustomTB
            self._shell.custom_exceptions, self._shell.CustomTB = (Exception, KeyboardInterrupt), self._handler

    def end(self) -> None:
        """Restore the previous handler, unless another one was installed since."""
        if self._before is not None and self._shell.CustomTB is self._handler:
            self._shell.custom_exceptions, self._shell.CustomTB = self._before
        self._before = None

    def show(self, error: BaseException) -> None:
        """Show the traceback of an error that ended no code of the cell, but what follows it."""
        self._show(type(error), error, error.__traceback__)

    def _show(self, kind: type[BaseException], error: BaseException, _trace: TracebackType | None, tb_offset: int | None = None) -> Any:
        without_ours(error)
        with lines_as_typed(error):
            return self._drawn(kind, error, tb_offset)

    def _drawn(self, kind: type[BaseException], error: BaseException, tb_offset: int | None) -> Any:
        if lines := self._traceback_of(error):
            return self._shown_as(lines, kind, error)
        handled, handler = self._before or ((), None)
        if handler is not None and isinstance(error, handled):
            return handler(kind, error, error.__traceback__, tb_offset)
        return self._shell.showtraceback((kind, error, error.__traceback__), running_compiled_code=True)

    def _shown_as(self, lines: list[str], kind: type[BaseException], error: Any) -> Any:
        error._render_traceback_ = lambda: lines  # by this name IPython asks an error how it looks
        try:
            return self._shell.showtraceback((kind, error, error.__traceback__), running_compiled_code=True)
        finally:
            del error._render_traceback_
