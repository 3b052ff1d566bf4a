"""What is shown of an interrupt that we have made: it is not a fault of the line it came in, so the user's own lines are enough."""

from __future__ import annotations

import traceback

from torchdebug_magics.report import own_traceback

__all__ = ["traceback_of"]


def traceback_of(error: BaseException, reason: str) -> list[str]:
    """In place of the usual traceback; nothing where `reason` is empty, as nobody of ours has interrupted."""
    if not reason or not isinstance(error, KeyboardInterrupt):
        return []
    from torchdebug_magics.probing.where import is_user_code, location  # noqa: PLC0415 - late: the gauges work without torch

    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    calls = [location(code.co_filename, line, code.co_name) for code, line in frames]
    return own_traceback(calls, f"{type(error).__name__}: {reason}")
