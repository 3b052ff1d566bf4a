"""The statements that a variable was made by, the latest first."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from torchdebug_magics.instruments.autograd.report import Cut
from torchdebug_magics.probing import syntax
from torchdebug_magics.probing.source.call_sites import function_node
from torchdebug_magics.probing.source.code_owner import is_user_code
from torchdebug_magics.probing.where import location
from torchdebug_magics.report import Location

_CALLS = {
    "detach": "detach", "item": "_local_scalar_dense", "tolist": "_local_scalar_dense", "numpy": "detach", "argmax": "argmax",
    "argmin": "argmin", "tensor": "lift_fresh", "as_tensor": "lift_fresh", "from_numpy": "lift_fresh", "round": "round", "long": "_to_copy",
    "int": "_to_copy", "bool": "_to_copy", "sign": "sign",
}  # fmt: skip
_OFF = ("no_grad", "inference_mode", "set_grad_enabled(False)")
_DEEPEST = 6


@dataclass(frozen=True)
class Slice:
    """A statement, and the blocks around it, the outermost first."""

    statement: ast.stmt
    around: tuple[ast.AST, ...]


def simple_statements(tree: ast.AST | None, around: tuple[ast.AST, ...] = ()) -> Iterator[Slice]:
    """In the order of the text; those of functions and classes are not among them, unless `tree` is one."""
    for child in ast.iter_child_nodes(tree) if tree is not None else ():
        if isinstance(child, syntax.SCOPES):
            continue
        if isinstance(child, ast.stmt):
            if hasattr(child, "body"):
                yield from simple_statements(child, (*around, child))
            else:
                yield Slice(child, around)
        elif not isinstance(child, ast.expr):
            yield from simple_statements(child, around)


def made_by(tree: ast.AST | None, names: set[str], last_line: int) -> Iterator[Slice]:
    """The statements up to a line that made what these names hold there."""
    wanted = set(names)
    for one in reversed([one for one in simple_statements(tree) if one.statement.lineno <= last_line]):
        if syntax.bound_names(one.statement) & wanted:
            yield one
            wanted |= syntax.read_names(one.statement)


def cuts_toward(names: set[str], file: str, last_line: int, function: str, namespace: Mapping[str, Any]) -> Iterator[Cut]:
    """On the way to what these names hold at a line, the nearest first; also inside the forwards that are called there."""
    tree = syntax.tree_of(file)
    body = tree if function == "<module>" else _function(tree, function, last_line) or tree
    for one in made_by(body, names, last_line):
        yield from _cuts_of(one, file, function, None)
        for name in syntax.read_names(one.statement):
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
    names = {name for one in returned for name in syntax.read_names(one.statement)}
    for one in (*returned, *made_by(node, names, sys.maxsize)):
        yield from _cuts_of(one, code.co_filename, code.co_name, None)
    yield from _decorated(node, code.co_filename, code.co_name, None)


def _function(tree: ast.AST | None, name: str, line: int) -> ast.AST | None:
    return next((one for one in syntax.nodes(syntax.FUNCTIONS, tree) if one.name == name and syntax.covers(one, line)), None)


def _cuts_of(one: Slice, file: str, function: str, module: str | None) -> Iterator[Cut]:
    for block in reversed(one.around):
        if isinstance(block, syntax.WITHS) and any(name in ast.unparse(one) for one in block.items for name in _OFF):
            yield Cut(op="no_grad", location=location(file, block.lineno, function), module=module)
    for node in ast.walk(one.statement):
        op = _op_of(node)
        if op:
            yield Cut(op=op, location=location(file, one.statement.lineno, function), module=module)


def _op_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and node.attr == "data":
        return "detach"
    name = syntax.called(node)
    if isinstance(node, ast.Call) and name in {"tensor", "as_tensor"} and node.args and isinstance(node.args[0], ast.Constant):
        return ""
    return _CALLS.get(name, "")


def _decorated(node: ast.AST, file: str, function: str, module: str | None) -> Iterator[Cut]:
    for decorator in getattr(node, "decorator_list", ()):
        if any(name in ast.unparse(decorator) for name in _OFF):
            yield Cut(op="no_grad", location=location(file, decorator.lineno, function), module=module)


def loop_around(where: Location | None) -> syntax.Loop | None:
    """The innermost loop around a line, in the same function."""
    return None if where is None else next(reversed(syntax.loops_around(syntax.tree_of(where.file), where.line)), None)


def carried_names(loop: syntax.Loop) -> list[tuple[str, int]]:
    """(name, line that binds it) of what the body reads before it binds it."""
    unbound: dict[str, int] = {}
    bound: dict[str, int] = {}
    for one in simple_statements(loop):
        for name in syntax.read_names(one.statement) - bound.keys():
            unbound.setdefault(name, one.statement.lineno)
        bound.update(dict.fromkeys(syntax.bound_names(one.statement), one.statement.lineno))
    return [(name, line) for name, line in bound.items() if name in unbound]


def earlier_backward(where: Location) -> Location | None:
    """The call of backward() nearest before a line, in the same block or one around it."""
    before = (one.statement for one in simple_statements(syntax.tree_of(where.file)) if one.statement.lineno < where.line)
    lines = [statement.lineno for statement in before if ".backward(" in ast.unparse(statement)]
    return location(where.file, lines[-1], where.function) if lines else None
