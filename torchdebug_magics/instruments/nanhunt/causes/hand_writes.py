"""The lines of the user's that write into a model by hand, such as a moving average of weights: read from the source, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchdebug_magics.probing.rerun.step_statements import writes_into
from torchdebug_magics.probing.source.statement_lists import lists_around, parse, written
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.probing.rerun.step import Position
    from torchdebug_magics.report import Location

__all__ = ["writers_of"]

_CALLED_ON = frozenset({"load_state_dict", "apply"})


def writers_of(variable: str, chain: tuple[Position, ...]) -> list[Location]:
    """In the functions (or the cell) that run now, the lines that write into the model of that name."""
    for position in chain:
        tree = parse(position.frame.f_code.co_filename)
        lists = lists_around(tree, (position.line, -1, position.line, -1)) if tree is not None else []
        lines = sorted({node.lineno for node in _writing(lists[-1][0], {variable})}) if lists else []
        if lines:
            code = position.frame.f_code
            return [location(code.co_filename, line, code.co_name) for line in lines]
    return []


def _writing(body: list[ast.stmt], names: set[str]) -> Iterator[ast.stmt]:
    for statement in body:
        inner = [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)]
        if isinstance(statement, ast.For) and _mentions(statement.iter, names):
            yield from _writing(inner, names | written([ast.Assign([statement.target], ast.Constant(0))]))
        elif inner:
            yield from _writing(inner, names)
        elif writes_into(statement, names) or _is_handed_over(statement, names):
            yield statement


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(node))


def _is_handed_over(statement: ast.stmt, names: set[str]) -> bool:
    """``update(teacher, student)``, and ``teacher.load_state_dict(...)``."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called, arguments = statement.value.func, statement.value.args
    if isinstance(called, ast.Attribute) and called.attr in _CALLED_ON and _mentions(called, names):
        return True
    return any(isinstance(one, ast.Name) and one.id in names for one in arguments)
