"""A user's traceback reads as it would without us: our frames, and torch's between them and an op, are taken out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchdebug_magics.errors import TorchDebugError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["without_ours"]

_OWN = str(Path(__file__).parent)
_WAY_TO_AN_OP = ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""What stands between a mode of ours and the op; without one, the op is called from C++."""


def without_ours(error: BaseException) -> None:
    """Relink the traceback in place, past what is ours; an error that is our own finding keeps all."""
    trace = None if isinstance(error, TorchDebugError) else error.__traceback__
    while trace is not None:
        trace.tb_next = _past_ours(trace.tb_next)
        trace = trace.tb_next


def _past_ours(trace: TracebackType | None) -> TracebackType | None:
    """The first that is not ours. What torch adds around a frame of ours is passed only together with it."""
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
