"""A statement that writes in place, and the same without."""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["out_of_place", "through_the_base", "writer_op", "writes_to"]

_MODULES = frozenset({"torch", "nn", "F", "functional", "init"})
_KEPT = frozenset({"requires_grad_", "retain_grad_", "_"})
_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
_AUGMENTED = {ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_", ast.Pow: "pow_"}
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "clamp_min_", "index_copy_"})


def writes_to(statement: ast.stmt) -> Iterator[str]:
    """The names whose tensors a statement writes in place, as far as its text tells."""
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else []
    if isinstance(statement, ast.Assign):
        targets = [one for one in statement.targets if isinstance(one, ast.Subscript)]
    yield from (ast.unparse(_base(one)) for one in targets)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and (written := _written(node)) is not None:
            yield ast.unparse(_base(written))


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


def writer_op(statement: ast.stmt | None) -> str | None:
    """The op of its first write, in the order in which Python evaluates."""
    for node in _evaluated(statement) if statement is not None else ():
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if _is_in_place(node) or _asks_in_place(node):
                return name if name.endswith("_") else f"{name}_"
    if isinstance(statement, ast.AugAssign):
        return _AUGMENTED.get(type(statement.op))
    return "copy_" if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript) else None


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What a node holds, before the node itself."""
    for child in ast.iter_child_nodes(node):
        yield from _evaluated(child)
    yield node


def through_the_base(statement: ast.stmt, loop: ast.stmt | None) -> str:
    """The loop and the statement, where that writes to the variable of a loop over a tensor: the same through the tensor, by index."""
    name = next(writes_to(statement), None)
    if name is None or not isinstance(loop, ast.For):
        return ""
    targets = list(loop.target.elts) if isinstance(loop.target, ast.Tuple) else [loop.target]
    place = next((number for number, one in enumerate(targets) if isinstance(one, ast.Name) and one.id == name), None)
    zipped = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "zip"
    sources = loop.iter.args if isinstance(loop.iter, ast.Call) and zipped else [loop.iter]
    if place is None or len(sources) != len(targets) or isinstance(sources[place], ast.Starred):
        return ""
    index = "i" if all(one.id != "i" for one in ast.walk(loop) if isinstance(one, ast.Name)) else "index"
    part = ast.parse(f"{ast.unparse(sources[place])}[{index}]", mode="eval").body
    code = ast.unparse(_Renamed(name, part).visit(copy.deepcopy(statement)))
    return f"for {index}, {_in_brackets(loop.target)} in enumerate({ast.unparse(loop.iter)}): {code}"


class _Renamed(ast.NodeTransformer):
    """Another expression in the place of a variable."""

    def __init__(self, name: str, part: ast.expr) -> None:
        self.name, self.part = name, part

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.part if node.id == self.name else node


def _in_brackets(target: ast.expr) -> str:
    code = ast.unparse(target)
    return f"({code})" if isinstance(target, ast.Tuple) and not code.startswith("(") else code


def _after_clone(target: ast.expr, statement: ast.stmt) -> str:
    base = ast.unparse(_base(target))
    return f"{base} = {base}.clone(); {ast.unparse(statement)}"


def _calls_out_of_place(statement: ast.stmt) -> str:
    changed = copy.deepcopy(statement)
    written: list[ast.expr] = []
    for node in ast.walk(changed):
        if not isinstance(node, ast.Call):
            continue
        if _is_in_place(node) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _OVERWRITING or ".data" in ast.unparse(node.func.value):
                return ""
            written += [one for one in [_written(node)] if one is not None]
            node.func.attr = node.func.attr[:-1]
        elif _asks_in_place(node):
            written += node.args[:1]
            node.keywords = [one for one in node.keywords if one.arg != "inplace"]
    if not written:
        return ""
    if not isinstance(statement, ast.Expr):
        return ast.unparse(changed)
    receiver = written[-1]  # of a chain of calls, the innermost
    if isinstance(receiver, ast.Subscript):
        return _after_clone(receiver, statement)
    return f"{ast.unparse(receiver)} = {ast.unparse(changed)}" if isinstance(receiver, (ast.Name, ast.Attribute)) else ""


def _written(node: ast.Call) -> ast.expr | None:
    """What a call writes: ``x`` of ``x.mul_(2)``, of ``torch.relu_(x)`` and of ``F.relu(x, inplace=True)``."""
    if not (_is_in_place(node) or _asks_in_place(node)) or not isinstance(node.func, ast.Attribute):
        return None
    of_module = ast.unparse(node.func.value).partition(".")[0] in _MODULES
    return next(iter(node.args), None) if of_module else node.func.value if _is_in_place(node) else None


def _is_in_place(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return name.endswith("_") and not name.startswith("_") and name not in _KEPT


def _asks_in_place(node: ast.Call) -> bool:
    return any(one.arg == "inplace" and isinstance(one.value, ast.Constant) and one.value.value is True for one in node.keywords)


def _base(node: ast.expr) -> ast.expr:
    """``h`` of ``h[0][:, 1]``, of ``h.data`` and of ``h.mul_(2)``; ``self.h`` stays."""
    while True:
        match node:
            case ast.Subscript(inner) | ast.Attribute(inner, "data" | "T"):
                node = inner
            case ast.Call(ast.Attribute(inner)) if _is_in_place(node):
                node = inner
            case _:
                return node
