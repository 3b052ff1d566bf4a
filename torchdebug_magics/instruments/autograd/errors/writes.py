"""A statement that writes in place, and the same without."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["out_of_place", "writes_to"]

_KEPT = frozenset({"requires_grad_", "retain_grad_", "_"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "clamp_min_", "index_copy_"})


def writes_to(statement: ast.stmt) -> Iterator[str]:
    """The names whose tensors a statement writes in place, as far as its text tells."""
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else []
    if isinstance(statement, ast.Assign):
        targets = [one for one in statement.targets if isinstance(one, ast.Subscript)]
    yield from (ast.unparse(_base(one)) for one in targets)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            if _is_in_place(node) and isinstance(node.func, ast.Attribute):
                yield ast.unparse(_base(node.func.value))
            elif _asks_in_place(node) and node.args:
                yield ast.unparse(_base(node.args[0]))


def out_of_place(statement: ast.stmt) -> str:
    """Code that can be pasted over the statement; empty where its text does not show how."""
    if isinstance(statement, ast.AugAssign):
        if isinstance(statement.target, ast.Subscript):
            return _after_clone(statement.target, statement)
        value = ast.unparse(statement.value)
        value = value if isinstance(statement.value, _SIMPLE) else f"({value})"
        target, operator = ast.unparse(statement.target), ast.unparse(ast.BinOp(ast.Name("a"), statement.op, ast.Name("b")))[2:-2]
        return f"{target} = {target} {operator.strip()} {value}"
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        return _after_clone(statement.targets[0], statement)
    return _calls_out_of_place(statement)


def _after_clone(target: ast.expr, statement: ast.stmt) -> str:
    base = ast.unparse(_base(target))
    return f"{base} = {base}.clone(); {ast.unparse(statement)}"


def _calls_out_of_place(statement: ast.stmt) -> str:
    changed = copy.deepcopy(statement)
    names: list[str] = []
    for node in ast.walk(changed):
        if not isinstance(node, ast.Call):
            continue
        if _is_in_place(node) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _OVERWRITING or ".data" in ast.unparse(node.func.value):
                return ""
            names.append(ast.unparse(node.func.value))
            node.func.attr = node.func.attr[:-1]
        elif _asks_in_place(node):
            names.append(ast.unparse(node.args[0]) if node.args else "")
            node.keywords = [one for one in node.keywords if one.arg != "inplace"]
    if not names:
        return ""
    code = ast.unparse(changed)
    return f"{names[0]} = {code}" if isinstance(statement, ast.Expr) and names[0].isidentifier() else code


def _is_in_place(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name.endswith("_") and not name.startswith("_") and name not in _KEPT


def _asks_in_place(node: ast.Call) -> bool:
    return any(one.arg == "inplace" and isinstance(one.value, ast.Constant) and one.value.value is True for one in node.keywords)


def _base(node: ast.expr) -> ast.expr:
    """``h`` of ``h[0][:, 1]`` and of ``h.data``; ``self.h`` stays."""
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in {"data", "T"}):
        node = node.value
    return node
