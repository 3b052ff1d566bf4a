"""Removes this package's frames from a user's traceback, and torch's between them and an op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["first_interrupt", "past_ours", "without_ours"]

_OWN = str(Path(__file__).parent)
_WAY_TO_AN_OP = ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files between a dispatch mode and the op; without a mode, the op is called from C++."""


def without_ours(error: BaseException) -> None:
    """Unlink this package's frames in place; a `TorchDebugError` keeps all frames."""
    trace = None if isinstance(error, TorchDebugError) else error.__traceback__
    while trace is not None:
        trace.tb_next = _past_ours(trace.tb_next)
        trace = trace.tb_next


def first_interrupt(error: BaseException) -> BaseException:
    """The interrupt that landed in the user's code, where clean-up has raised another one on top; else the error itself."""
    while isinstance(error, KeyboardInterrupt) and isinstance(error.__context__, KeyboardInterrupt):
        error = error.__context__
    return error


def past_ours(error: BaseException) -> TracebackType | None:
    """The traceback without this package's frames at its beginning."""
    return _past_ours(error.__traceback__)


def _past_ours(trace: TracebackType | None) -> TracebackType | None:
    """The first entry that is not ours; frames that torch adds around ours are skipped with them."""
    at, last_own = trace, None
    while at is not None and (_is_own(at) or _is_way(at)):
        if _is_own(at):
            last_own = at
        at = at.tb_next
    return trace if last_own is None else at


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_OWN)


def _is_way(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.replace("\\", "/").endswith(_WAY_TO_AN_OP)
