"""Tracebacks of interrupts and errors that a report explains, and interrupts held back until all state is restored."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchdebug_magics.report import own_traceback

__all__ = ["interrupts_held", "shortened", "traceback_of", "without_libraries"]


def traceback_of(error: BaseException, reason: str) -> list[str]:
    """The lines shown in place of an interrupt's traceback; empty where `reason` is empty, as the user interrupted."""
    return shortened(error, reason) if reason and isinstance(error, KeyboardInterrupt) else []


def shortened(error: BaseException, reason: str) -> list[str]:
    """The traceback of `error` without the frames of libraries, ending in `reason`."""
    from torchdebug_magics.probing.where import is_user_code, location  # noqa: PLC0415 - late: the gauges work without torch

    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    calls = [location(code.co_filename, line, code.co_name) for code, line in frames]
    return own_traceback(calls, f"{type(error).__name__}: {reason}")


def without_libraries(error: BaseException) -> list[str]:
    """The traceback of an error that a report explains; empty where the plain one is as short, or shows more than one error."""
    from torchdebug_magics.probing.where import is_user_code  # noqa: PLC0415 - as above

    is_chained = error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if is_chained or not isinstance(error, Exception) or not frames or is_user_code(frames[-1].f_code):
        return []
    return [*shortened(error, str(error)), "(the report below explains this error and holds the full traceback)"]


@contextmanager
def interrupts_held() -> Iterator[None]:
    """An interrupt waits until everything is back; a second one does not."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waiting: list[int] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        if waiting:
            signal.default_int_handler(number, None)
        waiting.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if waiting:
        raise KeyboardInterrupt
