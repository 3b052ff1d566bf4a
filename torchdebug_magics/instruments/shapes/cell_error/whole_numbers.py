"""The division that made a whole number a float, which an object has kept since: as `/` does even of two integers without a rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchdebug_magics.probing.source.edited_source import statements
from torchdebug_magics.probing.source.syntax import FUNCTIONS, called, dotted, enclosing, names_in, nodes, targets_of, tree_of
from torchdebug_magics.report import Location

DIVIDED = "`{}` is a float, where an integer is expected: `//` divides integers"


def dividing(file: str, part: ast.expr, value: Any) -> tuple[Location, ast.stmt, ast.BinOp] | None:
    """Where an attribute, or an option of a module, was given a whole float; None where it has none, or where several divisions may have.

    `value` is that of the expression `part` in a file.
    """
    is_module = isinstance(value, torch.nn.Module)
    kept = [value] if isinstance(part, ast.Attribute) else []
    if is_module:
        kept = [each for held in vars(value).values() for each in (held if isinstance(held, tuple) else [held])]
    if not any(type(each) is float and each.is_integer() for each in kept):
        return None
    if is_module:
        makers = _makers(file, type(value).__name__)
    else:
        makers = ((where, node) for where, node in statements(file) if dotted(part) in map(dotted, targets_of(node)))
    places = [(where, statement, division) for where, statement in makers for division in _divisions(statement)]
    return places[0] if len(places) == 1 else None


def _makers(file: str, kind: str) -> Iterator[tuple[Location, ast.stmt]]:
    """The statements that make a module of this class, and those of the same function that make what they read."""
    for where, statement in statements(file):
        if kind in map(called, nodes(ast.Call, statement)):
            around = [node for node in enclosing(tree_of(where.file), statement.lineno) if isinstance(node, FUNCTIONS)]
            yield where, statement
            made = [node for node in nodes(ast.Assign, *around[-1:]) if names_in(statement) & set(map(dotted, targets_of(node)))]
            yield from ((where, node) for node in made)


def _divisions(statement: ast.stmt) -> list[ast.BinOp]:
    """Those of a statement in which no float is written."""
    if any(type(node.value) is float for node in nodes(ast.Constant, statement)):
        return []
    return [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, ast.Div)]
