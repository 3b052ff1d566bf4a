"""Frames of a running program, and where each of them stood at one moment."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

from torchdebug_magics.probing.inlined import is_of_module
from torchdebug_magics.probing.source.statement_lists import span_as_written
from torchdebug_magics.probing.where import is_user_code, owner

__all__ = ["Place", "Position", "caller", "frame_chain", "line_of", "places", "same_call", "same_place"]

Place: TypeAlias = tuple[CodeType, int]
"""An instruction: unlike a frame it keeps no variables alive."""

_NOT_THE_USERS = frozenset({"own", "torch"})


class Position(NamedTuple):
    """A frame and the instruction it stood at."""

    frame: FrameType
    instruction: int

    @property
    def line(self) -> int:
        """The line of that instruction; counted only where it is asked for, as a step asks nothing of most frames."""
        return line_of((self.frame.f_code, self.instruction))


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither ours nor torch's. A frame that is kept keeps its variables: torch's hold the activations."""
    while frame is not None and owner(frame.f_code.co_filename) in _NOT_THE_USERS:
        frame = frame.f_back
    return frame


def frame_chain(frame: FrameType | None) -> tuple[Position, ...]:
    """The frame and its callers with their present positions, innermost first."""
    chain = []
    while frame is not None:
        chain.append(Position(frame, frame.f_lasti))
        if is_of_module(frame):
            break  # a cell or a script: what called it is nothing that a step could start in
        frame = frame.f_back
    return tuple(chain)


def same_place(one: tuple[Position, ...], other: tuple[Position, ...]) -> bool:
    """Whether two calls come from one place: the loop went round."""
    return any(
        here.frame is there.frame and here.instruction == there.instruction and is_user_code(here.frame.f_code)
        for here, there in zip(one, other, strict=False)
    )


def places(frame: FrameType | None, last: CodeType | None = None) -> tuple[Place, ...]:
    """Where the frame and its callers stand, innermost first, up to a frame of the code `last`; without it, as `frame_chain`."""
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((code, frame.f_lasti))
        if code is last or (last is None and is_of_module(frame)):
            break
        frame = frame.f_back
    return tuple(found)


def same_call(one: tuple[Place, ...], other: tuple[Place, ...]) -> bool:
    """Whether two calls come from the same expressions of the source, as far out as both are known; their code may be compiled anew."""
    return all(
        here == there or (here[0].co_filename == there[0].co_filename and _text(here) == _text(there))
        for here, there in zip(one, other, strict=False)
    )


def _text(place: Place) -> tuple[int, ...]:
    line = line_of(place)
    return span_as_written(*place, line) or (line,)


def line_of(place: Place) -> int:
    """The line of an instruction; 0 where it has none."""
    code, instruction = place
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, 0)
