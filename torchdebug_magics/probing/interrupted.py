"""Interrupts: what is shown of one that we have made, and how one waits until everything is put back."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torchdebug_magics.report import own_traceback

__all__ = ["interrupts_held", "traceback_of"]


def traceback_of(error: BaseException, reason: str) -> list[str]:
    """In place of the usual traceback; nothing where `reason` is empty, as nobody of ours has interrupted."""
    if not reason or not isinstance(error, KeyboardInterrupt):
        return []
    from torchdebug_magics.probing.where import is_user_code, location  # noqa: PLC0415 - late: the gauges work without torch

    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    calls = [location(code.co_filename, line, code.co_name) for code, line in frames]
    return own_traceback(calls, f"{type(error).__name__}: {reason}")


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
