"""What code objects say: whether a frame is in a comprehension, which names code reads and stores, and which functions it calls."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType

from torchdebug_magics.probing.source.code_owner import is_user_code

_PUTS_ASIDE = "LOAD_FAST_AND_CLEAR"
"""How such a comprehension begins: with the variable of the same name around it."""
_PUTS_BACK = "STORE_FAST"
_LOOPS = "FOR_ITER", "END_ASYNC_FOR"
_CODES = 512
_MOST_FUNCTIONS = 200


# Who traces a cell must not look at `f_locals` inside one: Python 3.12 then writes back what was seen, and the variable of the
# comprehension is lost.
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


@dataclass(frozen=True)
class Writes:
    """Names in one piece of code, and in the functions inside it."""

    attributes: frozenset[str]
    stored_globals: frozenset[str]
    loaded: frozenset[str]
    loaded_attributes: frozenset[str]


@functools.lru_cache(maxsize=2048)
def writes_of(code: CodeType) -> Writes:
    """What a piece of code writes and reads by name."""
    attributes, stored, loaded, loaded_attributes = set(), set(), set(), set()
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "STORE_ATTR":
                attributes.add(instruction.argval)
            case "STORE_GLOBAL":
                stored.add(instruction.argval)
            case "LOAD_GLOBAL" | "LOAD_NAME":
                loaded.add(instruction.argval)
            case "LOAD_ATTR" | "LOAD_METHOD":
                loaded_attributes.add(instruction.argval)
            case _:
                pass
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = writes_of(constant)
            attributes |= inner.attributes
            stored |= inner.stored_globals
            loaded |= inner.loaded
            loaded_attributes |= inner.loaded_attributes
    return Writes(frozenset(attributes), frozenset(stored), frozenset(loaded), frozenset(loaded_attributes))


def called_from(function: object) -> Iterator[FunctionType]:
    """The function, if it is one and the user's, and the user's functions that it calls by name, directly or through others."""
    todo, seen = [function] if isinstance(function, FunctionType) else [], set[int]()
    while todo and len(seen) < _MOST_FUNCTIONS:
        one = todo.pop()
        if id(one.__code__) not in seen and is_user_code(one.__code__):
            seen.add(id(one.__code__))
            yield one
            names = one.__globals__
            todo += [names[name] for name in writes_of(one.__code__).loaded & names.keys() if isinstance(names[name], FunctionType)]
