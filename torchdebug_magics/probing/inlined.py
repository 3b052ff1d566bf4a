"""Comprehensions that Python 3.12 and later run in the frame around them (PEP 709), and so among the lines of that frame.

Who traces a cell must not look at `f_locals` inside one: Python 3.12 then writes back what was seen, and the variable of the
comprehension is lost.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from inspect import CO_OPTIMIZED
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, FrameType

__all__ = ["is_in_comprehension", "is_of_module"]

_PUTS_ASIDE = "LOAD_FAST_AND_CLEAR"
"""How such a comprehension begins: with the variable of the same name around it."""
_PUTS_BACK = "STORE_FAST"
_LOOPS = "FOR_ITER", "END_ASYNC_FOR"
_CODES = 512


def is_in_comprehension(frame: FrameType) -> bool:
    """Whether what runs is a part of one; False on Python 3.11 and earlier, where each has a frame of its own."""
    return any(frame.f_lasti in one for one in _ranges(frame.f_code))


def is_of_module(frame: FrameType) -> bool:
    """Whether its names are those of a module or a cell, and no others, save what a comprehension binds."""
    if frame.f_code.co_flags & CO_OPTIMIZED:
        return False
    names = frame.f_locals  # Python 3.12 gives a copy inside a comprehension, and after a `:=` in one
    return names is frame.f_globals or is_in_comprehension(frame) or "__name__" in names


@lru_cache(_CODES)
def _ranges(code: CodeType) -> tuple[range, ...]:
    """Of instructions."""
    if _PUTS_ASIDE not in dis.opmap:
        return ()
    instructions = list(dis.get_instructions(code))
    bodies = [range(one.offset, _end(instructions[place:])) for place, one in enumerate(instructions) if one.opname == _PUTS_ASIDE]
    return (*bodies, *_after_errors(code, instructions, bodies))


def _end(instructions: Sequence[dis.Instruction]) -> int:
    """Behind what puts back, after the loop, the variable that the first of these puts aside."""
    name = instructions[0].argval
    loop = next(one for one in instructions if one.opname in _LOOPS)
    after = loop.argval if loop.opname == _LOOPS[0] else loop.offset
    return next(
        one.offset + 1 for one in instructions if one.offset >= after and one.opname.startswith(_PUTS_BACK) and name in _stored(one)
    )


def _stored(instruction: dis.Instruction) -> tuple[str, ...]:
    """Some instructions of Python 3.13 store two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _after_errors(code: CodeType, instructions: Sequence[dis.Instruction], bodies: Sequence[range]) -> Iterator[range]:
    """What puts a variable back after an error; it begins without `PUSH_EXC_INFO`, as a handler of the user's would."""
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        if any(entry.start in body for body in bodies):
            handler = [one for one in instructions if one.offset >= entry.target]
            if handler[0].opname != "PUSH_EXC_INFO":
                yield range(entry.target, next(one.offset for one in handler if one.opname == "RERAISE"))
