"""Frames of a running program, and where each of them stood at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import FrameType

from torchdebug_magics.probing.where import frames_above, is_user_code, owner

__all__ = ["Position", "caller", "frame_chain", "same_place"]

_NOT_THE_USERS = frozenset({"own", "torch"})


@dataclass(frozen=True)
class Position:
    """A frame and the instruction it stood at."""

    frame: FrameType = field(repr=False)
    line: int
    instruction: int


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither ours nor torch's. A frame that is kept keeps its variables: torch's hold the activations."""
    while frame is not None and owner(frame.f_code.co_filename) in _NOT_THE_USERS:
        frame = frame.f_back
    return frame


def frame_chain(frame: FrameType | None) -> tuple[Position, ...]:
    """The frame and its callers with their present positions, innermost first."""
    chain = []
    for one in frames_above(frame):
        chain.append(Position(one, one.f_lineno or 0, one.f_lasti))
        if not one.f_code.co_flags & CO_OPTIMIZED and one.f_locals is one.f_globals:
            break  # a cell or a script: what called it is nothing that a step could start in
    return tuple(chain)


def same_place(one: tuple[Position, ...], other: tuple[Position, ...]) -> bool:
    """Whether two calls come from one place: the loop went round."""
    return any(
        here.frame is there.frame and here.instruction == there.instruction and is_user_code(here.frame.f_code)
        for here, there in zip(one, other, strict=False)
    )
