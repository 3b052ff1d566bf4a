"""A module that was made with what `/` gives, a float even of two integers without a rest, and that fails when it is called."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.cell_error.changes import DIVIDED
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.source.edited_source import Source, cells, same
from torchdebug_magics.probing.source.syntax import FUNCTIONS, called, dotted, enclosing, exchanged, names_in, nodes, targets_of
from torchdebug_magics.probing.source.user_code import is_user_code


def fractional_option(error: BaseException) -> Failure | None:
    """The division that gave an option of the module that ran, and the same with ``//``; None where it is not the only one."""
    ran: list[Any] = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [value for value in ran if isinstance(value, torch.nn.Module)]
    if not isinstance(error, TypeError) or not modules or is_user_code(type(modules[-1]).forward.__code__):
        return None
    options = [part for value in vars(modules[-1]).values() for part in (value if isinstance(value, tuple) else [value])]
    if not any(type(part) is float and part.is_integer() for part in options):
        return None
    places = [(source, statement, node) for source, statement in _makers(modules[-1]) for node in _divisions(statement)]
    if len(places) != 1:
        return None
    source, statement, division = places[0]
    whole = ast.BinOp(division.left, ast.FloorDiv(), division.right)
    text = ast.unparse(exchanged(statement, lambda node: whole if same(node, division) else None))
    edit = source.replacing(statement, text)
    failure = refusal(error, DIVIDED.format(ast.unparse(division)), fixes=[Fix(code=text, verified=False, changes=(edit,))])
    return replace(failure, location=replace(source.where, line=edit.line, source=edit.old.partition("\n")[0]), underlined=None)


def _makers(module: torch.nn.Module) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements that make a module of this class, and those of the same function that make what they read."""
    for source in cells():
        for statement in (node for node in nodes(ast.stmt, source.tree) if not hasattr(node, "body")):
            if type(module).__name__ in map(called, nodes(ast.Call, statement)):
                around = [node for node in enclosing(source.tree, statement.lineno) if isinstance(node, FUNCTIONS)]
                read = names_in(statement)
                yield source, statement
                yield from ((source, node) for node in nodes(ast.Assign, *around[-1:]) if read & set(map(dotted, targets_of(node))))


def _divisions(statement: ast.stmt) -> list[ast.BinOp]:
    """Those of a statement in which no float is written."""
    if any(type(node.value) is float for node in nodes(ast.Constant, statement)):
        return []
    return [node for node in nodes(ast.BinOp, statement) if isinstance(node.op, ast.Div)]
