"""The truth of a tensor: `if`, `and`, `in` and chained comparisons ask for one, and a tensor of several elements has none."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from torchdebug_magics.format import shape
from torchdebug_magics.probing.source.syntax import called, expression, nodes

_BITWISE: dict[type[ast.boolop], ast.operator] = {ast.And: ast.BitAnd(), ast.Or: ast.BitOr()}
_PAIR = 2
_PAIRWISE = {"max": "maximum", "min": "minimum"}
Rewritten = tuple[ast.expr, ast.expr, str, bool]
"""(an expression, what was meant, why, whether nothing else can be meant)."""


def asked_truths(error: BaseException, statement: ast.stmt, value: Callable[[ast.expr], Any]) -> Iterator[Rewritten]:
    """What a statement may have meant that asks for the truth of a tensor of several elements, the likeliest first."""
    if not isinstance(error, (RuntimeError, ValueError)) or "ambiguous" not in str(error):
        return
    for node in _compounds(statement):
        yield from _compound(node, value)
    for test in _tests(statement):
        yield from _plain(test, value, is_asserted=isinstance(statement, ast.Assert))


def _compound(node: ast.expr, value: Callable[[ast.expr], Any]) -> Iterator[Rewritten]:
    """Of an expression that asks for the truth of its parts."""
    match node:
        case ast.Compare(left, ops, comparators) if len(ops) > 1:
            sides = [left, *comparators]
            pairs = [ast.Compare(sides[at], [op], [sides[at + 1]]) for at, op in enumerate(ops)]
            yield node, _joined(pairs, ast.BitAnd()), f"`{ast.unparse(node)}` asks for the truth of its first half, which is a tensor", True
        case ast.Compare(left, [ast.In() | ast.NotIn() as op], [container]) if isinstance(items := value(container), (list, tuple)):
            how = "item is {}" if isinstance(left, (ast.Name, ast.Attribute)) else "torch.equal(item, {})"
            word = "any" if isinstance(op, ast.In) else "not any"
            new = expression(f"{word}([{how.format(ast.unparse(left))} for item in {ast.unparse(container)}])")
            yield node, new, f"`in` compares tensors element by element, here with those of a {type(items).__name__} of {len(items)}", True
        case ast.BoolOp(op, values):
            tensors = [each for each in values if _is_array(value(each))]
            if isinstance(op, ast.Or) and len(values) == _PAIR and values[0] in tensors and not _is_bool(value(values[0])):
                new = ast.IfExp(_is_there(values[0], ast.IsNot()), values[0], values[1])
                yield node, new, _said(values[0], value, "`or` asks whether it is true, not whether it is there"), True
            elif tensors:
                word, sign = ("and", "&") if isinstance(op, ast.And) else ("or", "|")
                yield node, _joined(values, _BITWISE[type(op)]), f"`{word}` takes no tensors of several elements: `{sign}` does", True
        case ast.Call(args=args):
            function = _PAIRWISE[called(node)]
            new = ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), function, ast.Load()), args, [])
            yield node, new, f"Python's `{called(node)}` compares whole tensors: `torch.{function}` compares their elements", True


def _compounds(statement: ast.stmt) -> Iterator[ast.expr]:
    """The innermost first."""
    for node in reversed([*nodes(ast.expr, *_heads(statement))]):
        match node:
            case ast.BoolOp() | ast.Compare(ops=[_, _, *_]) | ast.Compare(ops=[ast.In() | ast.NotIn()]):
                yield node
            case ast.Call(args=[_, _, *_]) if called(node) in _PAIRWISE:
                yield node
            case _:
                pass


def _tests(statement: ast.stmt) -> Iterator[ast.expr]:
    """The conditions of a statement, the innermost first."""
    for node in reversed([*nodes(ast.AST, *_heads(statement))]):
        match node:
            case ast.IfExp(test):
                yield test
            case ast.UnaryOp(ast.Not()):
                yield node
            case ast.comprehension(ifs=ifs):
                yield from ifs
            case _:
                pass
    yield from [statement.test] if isinstance(statement, (ast.If, ast.While, ast.Assert)) else []


def _heads(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement without its body."""
    for name, value in ast.iter_fields(statement):
        if name not in {"body", "orelse", "finalbody", "handlers"}:
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def _plain(node: ast.expr, value: Callable[[ast.expr], Any], *, is_asserted: bool) -> Iterator[Rewritten]:
    """``if mask:``, ``if not mask:`` of a variable that may be None; of a comparison, whether all or any of its elements are meant."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    tensor = value(inner)
    if not _is_array(tensor):
        return
    said = _said(inner, value, "it has no single truth value")
    if isinstance(inner, (ast.Name, ast.Attribute, ast.Subscript)) and not _is_bool(tensor):
        yield node, _is_there(inner, ast.Is() if inner is not node else ast.IsNot()), said, True
        return
    is_equality = isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq)
    is_all = is_asserted or inner is not node or is_equality
    ways = ("all",) if is_all else ("any",)
    for way in ways:
        called_on = ast.Call(ast.Attribute(inner, way, ast.Load()), [], [])
        both = f"{said}: `.any()` or `.all()` of its elements has"
        yield (
            node,
            called_on if inner is node else ast.UnaryOp(ast.Not(), called_on),
            both,
            isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq),
        )


def _said(node: ast.expr, value: Callable[[ast.expr], Any], words: str) -> str:
    return f"`{ast.unparse(node)}` is a tensor of {shape(tuple(value(node).shape))}, and {words}"


def _is_there(node: ast.expr, op: ast.cmpop) -> ast.Compare:
    return ast.Compare(node, [op], [ast.Constant(None)])


def _joined(values: list[Any], op: ast.operator) -> ast.expr:
    joined: ast.expr = values[0]
    for each in values[1:]:
        joined = ast.BinOp(joined, op, each)
    return joined


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and np.prod(value.shape) != 1


def _is_bool(value: Any) -> bool:
    return value.dtype in {torch.bool, np.dtype(bool)}
