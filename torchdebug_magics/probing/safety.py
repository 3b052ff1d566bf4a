"""What must not reach the user's cell: our own failure in a callback is one line of the report; an interrupt waits for what puts back."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from torchdebug_magics.errors import error_line
from torchdebug_magics.probing.source.user_code import is_user_code, location
from torchdebug_magics.report import own_traceback
from torchdebug_magics.session import first_interrupt

P = ParamSpec("P")
T = TypeVar("T")


class _AtWork(threading.local):
    guard: Guard | None = None
    """Whose callback this thread runs."""


_at_work = _AtWork()


class Guard:
    """Runs our callbacks and collects what went wrong in them, each thing once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def note(self, problem: str) -> None:
        """Add a line to the report's problems, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def remark(self, text: str) -> None:
        """Add a line to the report's notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def run(self, what: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `call` returns, or None and a note that `what` failed."""
        outer, _at_work.guard = _at_work.guard, self
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any failure of ours must leave the user's cell alone; it is reported
            self.note(f"{what} failed: {error_line(error, 200)}")
            return None
        finally:
            _at_work.guard = outer

    def is_passed_by(self) -> bool:
        """Whether another session computes here, or runs the user's code again: none of that belongs to the run that is watched."""
        return _at_work.guard is not None and _at_work.guard is not self


def traceback_of(error: BaseException, reason: str) -> list[str]:
    """The lines shown in place of an interrupt's traceback; empty where `reason` is empty, as the user interrupted."""
    return shortened(error, reason) if reason and isinstance(error, KeyboardInterrupt) else []


def shortened(error: BaseException, reason: str) -> list[str]:
    """The traceback of `error` without the frames of libraries, ending in `reason`."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    calls = [location(code.co_filename, line, code.co_name) for code, line in frames]
    return own_traceback(calls, f"{type(error).__name__}: {reason}".removesuffix(": "))


def without_libraries(error: BaseException) -> list[str]:
    """The traceback by the user's own calls; empty for an error of the user's that the plain one shows as well, or that follows another.

    An interrupt may have landed anywhere: where it did says nothing.
    """
    from torchdebug_magics.probing.source.user_code import owner  # noqa: PLC0415 - as above

    is_chained = error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)
    error = first_interrupt(error)
    owners = [owner(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, KeyboardInterrupt):
        return shortened(error, str(error))
    is_plain = not owners or (owners[-1] == "user" and "own" not in owners)
    return [] if is_chained or is_plain or not isinstance(error, Exception) else shortened(error, str(error))


@contextmanager
def interrupts_held(*, all_of_them: bool = False) -> Iterator[None]:
    """An interrupt waits until everything is back; a second one does not, unless `all_of_them` have to."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waiting: list[int] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        if waiting and not all_of_them:
            signal.default_int_handler(number, None)
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        raise KeyboardInterrupt


@contextmanager
def quiet() -> Iterator[None]:
    """What it prints, warns of and logs is not seen."""
    disabled = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(sys.maxsize)
        try:
            yield
        finally:
            logging.disable(disabled)
