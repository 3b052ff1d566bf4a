"""Which names a function writes and reads, as its bytecode says; read once a function."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType

from torchdebug_magics.probing.where import is_user_code

__all__ = ["Writes", "called_from", "writes_of"]

_MOST_FUNCTIONS = 200


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
