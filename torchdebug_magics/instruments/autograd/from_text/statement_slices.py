"""The statements that a variable was made by, the latest first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Slice", "bound_by", "made_by", "read_by", "simple_statements"]


@dataclass(frozen=True)
class Slice:
    """A statement, and the blocks around it, the outermost first."""

    statement: ast.stmt
    around: tuple[ast.AST, ...]


def simple_statements(tree: ast.AST, around: tuple[ast.AST, ...] = ()) -> Iterator[Slice]:
    """In the order of the text; those of functions and classes are not among them, unless `tree` is one."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            if hasattr(child, "body"):
                yield from simple_statements(child, (*around, child))
            else:
                yield Slice(child, around)
        elif not isinstance(child, ast.expr):
            yield from simple_statements(child, around)


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that it binds."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def read_by(node: ast.AST) -> set[str]:
    """The names that it reads."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return names | ({node.target.id} if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) else set())


def made_by(tree: ast.AST, names: set[str], last_line: int) -> Iterator[Slice]:
    """The statements up to a line that made what these names hold there."""
    wanted = set(names)
    for one in reversed([one for one in simple_statements(tree) if one.statement.lineno <= last_line]):
        if bound_by(one.statement) & wanted:
            yield one
            wanted |= read_by(one.statement)
