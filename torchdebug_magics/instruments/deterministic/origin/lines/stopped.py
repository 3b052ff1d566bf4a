"""The line of the user's at which an error ended a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Activation, Step

__all__ = ["stopped_at"]


def stopped_at(error: BaseException, ended: Mapping[int, Activation]) -> Step | None:
    """The innermost line of those calls, by the id of their frames, that the error has passed; None where it passed none."""
    return next(filter(None, (_innermost(one, ended) for one in _tracebacks(error))), None)


def _tracebacks(error: BaseException) -> Iterator[TracebackType | None]:
    """Of what was raised by the op in question first; of what other ops raised while that passed, after it."""
    chain = [error]
    while chain[-1].__context__ is not None and type(chain[-1].__context__) is type(error):
        chain.append(chain[-1].__context__)
    return (one.__traceback__ for one in reversed(chain))


def _innermost(traceback: TracebackType | None, ended: Mapping[int, Activation]) -> Step | None:
    found = None
    while traceback is not None:
        activation = ended.get(id(traceback.tb_frame))
        if activation is not None and activation.code is traceback.tb_frame.f_code:
            found = next((step for step in reversed(activation.steps) if _is_at(step, traceback.tb_lineno)), found)
        traceback = traceback.tb_next
    return found


def _is_at(step: Step, line: int) -> bool:
    return step.line == line or (step.statement is not None and step.statement.first <= line <= step.statement.last)
