"""Statements of a file or a cell: its syntax tree, the lists around a place in it, and the names that statements read and bind."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.where import span

_PUTS_ASIDE = "LOAD_FAST_AND_CLEAR"
"""How such a comprehension begins: with the variable of the same name around it."""
_PUTS_BACK = "STORE_FAST"
_LOOPS = "FOR_ITER", "END_ASYNC_FOR"
_CODES = 512
_MOST_FUNCTIONS = 200


class Edited(NamedTuple):
    """What stands for a file while code is tried out with a change in it."""

    tree: ast.Module
    lines: frozenset[int]
    """Those that are not as the user wrote them."""


EDITED: dict[str, Edited] = {}
"""By the name of the file."""


def span_as_written(code: CodeType, instruction: int, line: int) -> tuple[int, int, int, int] | None:
    """See `span`; None also on a line that is changed, where columns are others than the tree's."""
    edited = EDITED.get(code.co_filename)
    return None if edited is not None and line in edited.lines else span(code, instruction)


def parse(filename: str) -> ast.Module | None:
    """The syntax tree of a file or cell, or None where its source is not at hand."""
    if filename in EDITED:
        return EDITED[filename].tree
    lines = linecache.getlines(filename)
    return _parse("".join(lines)) if lines else None


@functools.lru_cache(maxsize=32)
def _parse(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def lists_around(tree: ast.Module, where: tuple[int, int, int, int]) -> list[tuple[list[ast.stmt], int]]:
    """The statement lists around a position, innermost first, each with the place of the statement that holds it.

    Stops at the function the position is in.
    """
    found: list[tuple[list[ast.stmt], int]] = []
    body: list[ast.stmt] | None = tree.body
    while body is not None:
        holder = next((place for place, statement in enumerate(body) if _holds(statement, where)), None)
        if holder is None:
            break
        found.append((body, holder))
        statement = body[holder]
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not _in_header(statement, where):
            found.clear()
        body = next((inner for inner in _bodies(statement) if any(_holds(one, where) for one in inner)), None)
    return found[::-1]


def _holds(statement: ast.stmt, where: tuple[int, int, int, int]) -> bool:
    line, column, end_line, end_column = where
    first: int = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", ()))])
    last: int = statement.end_lineno or statement.lineno
    if column < 0:
        return first <= line <= last
    start, end = (first, statement.col_offset if first == statement.lineno else 0), (last, statement.end_col_offset or 0)
    return bool(start <= (line, column) <= (end_line, end_column) <= end)


def _in_header(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, where: tuple[int, int, int, int]) -> bool:
    return where[0] < statement.body[0].lineno and statement.lineno != statement.body[0].lineno


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(statement, name, None)
        if isinstance(inner, list) and inner:
            yield inner
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def written(statements: list[ast.stmt]) -> set[str]:
    """Names that the statements bind."""
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
    }


def read_before_written(statements: list[ast.stmt]) -> set[str]:
    """Names whose value from before the statements is read."""
    known: set[str] = set()
    free: set[str] = set()
    for statement in statements:
        _scan(statement, known, free)
    return free


def _scan(statement: ast.stmt, known: set[str], free: set[str]) -> None:
    """Reads of a statement come before its writes; a compound one is scanned in the order it runs."""
    inner = list(_bodies(statement))
    nested = {id(one) for body in inner for one in body}
    own = [node for child in ast.iter_child_nodes(statement) if id(child) not in nested for node in ast.walk(child)]
    if not inner or isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        own = list(ast.walk(statement))
    reads = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        reads.add(statement.target.id)
    free |= reads - known
    stores = {node.id for node in own if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        stores = {statement.name}
        known |= stores
        return
    known |= stores
    for body in inner:
        # What a branch or a loop binds may not be bound after it.
        local = set(known)
        for one in body:
            _scan(one, local, free)
        if isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
            known |= local


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
