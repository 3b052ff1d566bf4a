"""Statements of a file or a cell: its syntax tree, the lists around a place in it, and the names that statements read and bind."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

from torchdebug_magics.probing.where import span

__all__ = ["EDITED", "Edited", "lists_around", "parse", "read_before_written", "span_as_written", "written"]


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
