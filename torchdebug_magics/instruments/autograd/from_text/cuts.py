"""What in a source cuts a graph: ``.detach()``, ``no_grad``, ``argmax``, numbers put into a new tensor."""

from __future__ import annotations

import ast
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.autograd.from_text.statement_slices import made_by, read_by, simple_statements
from torchdebug_magics.instruments.autograd.report import Cut
from torchdebug_magics.probing.source.call_sites import function_node, tree_of
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchdebug_magics.instruments.autograd.from_text.statement_slices import Slice

__all__ = ["cuts_in_forward", "cuts_toward"]

_CALLS = {
    "detach": "detach", "item": "_local_scalar_dense", "tolist": "_local_scalar_dense", "numpy": "detach", "argmax": "argmax",
    "argmin": "argmin", "tensor": "lift_fresh", "as_tensor": "lift_fresh", "from_numpy": "lift_fresh", "round": "round", "long": "_to_copy",
    "int": "_to_copy", "bool": "_to_copy", "sign": "sign",
}  # fmt: skip
_OFF = ("no_grad", "inference_mode", "set_grad_enabled(False)")
_DEEPEST = 6


def cuts_toward(names: set[str], file: str, last_line: int, function: str, namespace: Mapping[str, Any]) -> Iterator[Cut]:
    """On the way to what these names hold at a line, the nearest first; also inside the forwards that are called there."""
    tree = tree_of(file)
    body = tree if tree is None or function == "<module>" else _function(tree, function, last_line) or tree
    for one in made_by(body, names, last_line) if body is not None else ():
        yield from _cuts_of(one, file, function, None)
        for name in read_by(one.statement):
            value = namespace.get(name)
            if isinstance(value, torch.nn.Module):
                yield from cuts_in_forward(value, "")
            elif isinstance(value, FunctionType):
                yield from _cuts_in_function(value)


def cuts_in_forward(module: torch.nn.Module, path: str, depth: int = 0) -> Iterator[Cut]:
    """In the forward of a module of the user's, and of those inside it."""
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and is_user_code(code) and (node := function_node(code)) is not None:
        for one in simple_statements(node):
            yield from _cuts_of(one, code.co_filename, code.co_name, path)
        yield from _decorated(node, code.co_filename, code.co_name, path)
    for name, child in module.named_children() if depth < _DEEPEST else ():
        yield from cuts_in_forward(child, f"{path}.{name}".lstrip("."), depth + 1)


def _cuts_in_function(function: FunctionType) -> Iterator[Cut]:
    """On the way to what a function of the user's returns."""
    code = function.__code__
    node = function_node(code) if is_user_code(code) else None
    if node is None:
        return
    returned = [one for one in simple_statements(node) if isinstance(one.statement, ast.Return)]
    names = {name for one in returned for name in read_by(one.statement)}
    for one in (*returned, *made_by(node, names, sys.maxsize)):
        yield from _cuts_of(one, code.co_filename, code.co_name, None)
    yield from _decorated(node, code.co_filename, code.co_name, None)


def _function(tree: ast.AST, name: str, line: int) -> ast.AST | None:
    found = (one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name == name)
    return next((one for one in found if one.lineno <= line <= (one.end_lineno or line)), None)


def _cuts_of(one: Slice, file: str, function: str, module: str | None) -> Iterator[Cut]:
    for block in reversed(one.around):
        if isinstance(block, (ast.With, ast.AsyncWith)) and any(name in ast.unparse(one) for one in block.items for name in _OFF):
            yield Cut(op="no_grad", location=location(file, block.lineno, function), module=module)
    for node in ast.walk(one.statement):
        op = _op_of(node)
        if op:
            yield Cut(op=op, location=location(file, one.statement.lineno, function), module=module)


def _op_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and node.attr == "data":
        return "detach"
    if not isinstance(node, ast.Call):
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    if name in {"tensor", "as_tensor"} and node.args and isinstance(node.args[0], ast.Constant):
        return ""
    return _CALLS.get(name, "")


def _decorated(node: ast.AST, file: str, function: str, module: str | None) -> Iterator[Cut]:
    for decorator in getattr(node, "decorator_list", ()):
        if any(name in ast.unparse(decorator) for name in _OFF):
            yield Cut(op="no_grad", location=location(file, decorator.lineno, function), module=module)
