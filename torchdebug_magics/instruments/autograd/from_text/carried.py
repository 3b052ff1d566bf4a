"""Which variables a loop carries from one step to the next, with their graphs."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.from_text.statement_slices import bound_by, read_by, simple_statements
from torchdebug_magics.probing.source.call_sites import enclosing, tree_of
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["carried_names", "earlier_backward", "loop_around"]


def loop_around(where: Location) -> ast.For | ast.While | None:
    """The innermost loop around a line, in the same function."""
    tree = tree_of(where.file)
    found: ast.For | ast.While | None = None
    for statement in enclosing(tree, where.line) if tree is not None else ():
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = None
        elif isinstance(statement, (ast.For, ast.While)):
            found = statement
    return found


def carried_names(loop: ast.For | ast.While) -> list[tuple[str, int]]:
    """(name, line that binds it) of what the body reads before it binds it."""
    unbound: dict[str, int] = {}
    bound: dict[str, int] = {}
    for one in simple_statements(loop):
        for name in read_by(one.statement) - bound.keys():
            unbound.setdefault(name, one.statement.lineno)
        bound.update(dict.fromkeys(bound_by(one.statement), one.statement.lineno))
    return [(name, line) for name, line in bound.items() if name in unbound]


def earlier_backward(where: Location) -> Location | None:
    """The call of backward() nearest before a line, in the same block or one around it."""
    tree = tree_of(where.file)
    lines = [
        one.statement.lineno
        for one in (simple_statements(tree) if tree is not None else ())
        if ".backward(" in ast.unparse(one.statement) and one.statement.lineno < where.line
    ]
    return location(where.file, lines[-1], where.function) if lines else None
