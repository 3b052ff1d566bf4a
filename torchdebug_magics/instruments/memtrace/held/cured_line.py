"""The user's own line with the cure in it: ``losses.append(loss.detach())`` for ``losses.append(loss)``."""

from __future__ import annotations

import ast

__all__ = ["adds_a_number", "rewritten", "target"]

_ADDS = frozenset({"append", "appendleft", "add", "put"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def rewritten(source: str, cure: str) -> str:
    """The line with `cure`, such as ``.detach()``, behind what it puts somewhere; empty where it is not one plain statement."""
    statement = _statement(source)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Add, ast.Sub)):
        statement.value = _cured(statement.value, cure)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        if isinstance(statement.value, (ast.List, ast.Dict, ast.Tuple, ast.ListComp, ast.DictComp)):
            return ""
        statement.value = _cured(statement.value, cure)
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        is_put = isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS
        if not is_put or len(call.args) != 1 or call.keywords or not isinstance(call.args[0], (*_SIMPLE, ast.BinOp)):
            return ""
        call.args[0] = _cured(call.args[0], cure)
    else:
        return ""
    return ast.unparse(statement)


def target(source: str) -> str:
    """The attribute that the line sets, such as ``module.input``; empty where it sets none."""
    statement = _statement(source)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute):
        return ""
    return ast.unparse(statement.targets[0])


def adds_a_number(source: str) -> bool:
    """Whether the line is of the kind ``total += loss``."""
    return isinstance(_statement(source), ast.AugAssign)


def _statement(source: str) -> ast.stmt | None:
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 else None


def _cured(value: ast.expr, cure: str) -> ast.expr:
    text = ast.unparse(value)
    return ast.parse(f"{text}{cure}" if isinstance(value, _SIMPLE) else f"({text}){cure}", mode="eval").body
