"""Loops that draw again until a draw is right, where no draw can be: ``while item in taken: item = random.randint(1, 9)``.

What can be drawn is known from the call, and the condition is asked of each value. Nothing of the user's runs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.hangwatch.report import HangFinding
from torchdebug_magics.probing.source.call_sites import MISSING, value_of
from torchdebug_magics.probing.source.edited_source import Source
from torchdebug_magics.probing.source.syntax import Loop, called, dotted, last_name, names_in, tree_of
from torchdebug_magics.probing.source.user_code import location

COMPARED: dict[type[ast.cmpop], Any] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_MEMBERS: dict[type[ast.cmpop], bool] = {ast.In: True, ast.NotIn: False}
_CONTAINERS = (list, tuple, set, frozenset, dict, range)
_PLAIN = (bool, int, float, str)
_MOST_VALUES = 100_000
_ROUNDS = 100
"""How often the edited loop draws."""


def retry_loop(loops: Sequence[Loop], frame: FrameType) -> HangFinding | None:
    """The innermost loop of a single statement, a draw, that no value which can be drawn leaves; None where one may."""
    for loop in reversed(loops):
        match loop:
            case ast.While(test, [ast.Assign([ast.Name(name)], value) as draw]) if name in names_in(test):
                values = _drawn(value, frame)
                if values and len(values) <= _MOST_VALUES and all(_holds(test, name, each, frame) is True for each in values):
                    return _finding(loop, draw, values, frame)
    return None


def _drawn(node: ast.expr, frame: FrameType) -> Sequence[Any]:
    """All values that a call may return which draws at random; empty for any other call, and where they are not known."""
    if isinstance(node, ast.Call) and (called(node) == "item" or dotted(node.func) == "int"):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else next(iter(node.args), node)
        return _drawn(inner, frame) if inner is not node else ()
    if not isinstance(node, ast.Call) or not node.args:
        return ()
    name, given = last_name(node.func), [value_of(argument, frame) for argument in node.args]
    ends = [_plain(value) for value in given if type(_plain(value)) is int]
    is_torch, is_numpy = (dotted(node.func).startswith(prefix) for prefix in (("torch.",), ("np.", "numpy.")))
    if name == "choice" and (len(node.args) == 1 or is_numpy):
        return range(ends[0]) if type(given[0]) is not str and ends[:1] == [_plain(given[0])] else _items(given[0])
    if name in {"randint", "randrange"} and ends and len(ends) == min(len(given), 2):
        low, high = (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])
        return range(low, high + (name == "randint" and not is_torch and not is_numpy))
    if name == "multinomial" and isinstance(given[0], torch.Tensor) and given[0].numel() == given[0].shape[-1]:
        return [int(place) for place in given[0].detach().flatten().nonzero().flatten().tolist()]
    return ()


def _items(values: Any) -> Sequence[Any]:
    """The elements of a sequence of plain values."""
    if type(values).__module__ == "numpy" and getattr(values, "ndim", 0) == 1:
        values = values.tolist()
    if type(values) not in {list, tuple, range, str}:
        return ()
    items = [_plain(value) for value in values[:_MOST_VALUES]]
    return items if all(type(item) in _PLAIN for item in items) else ()


def _plain(value: Any) -> Any:
    """A number of NumPy's, or a tensor of one, as Python's."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if is_number or (type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0) else value


def _holds(test: ast.expr, name: str, value: Any, frame: FrameType) -> bool | None:
    """A condition where the variable has that value; None where it is not known."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            inner = _holds(operand, name, value, frame)
            return None if inner is None else not inner
        case ast.BoolOp(how, parts):
            held = [_holds(part, name, value, frame) for part in parts]
            return None if None in held else all(held) if isinstance(how, ast.And) else any(held)
        case ast.Compare(left, [how], [right]):
            sides = [_side(node, name, value, frame) for node in (left, right)]
            if type(how) in _MEMBERS and type(sides[1]) in _CONTAINERS and type(sides[0]) in _PLAIN:
                return (sides[0] in sides[1]) is _MEMBERS[type(how)]
            if type(how) in COMPARED and all(type(side) in _PLAIN for side in sides):
                return bool(COMPARED[type(how)](*sides))
    return None


def _side(node: ast.expr, name: str, value: Any, frame: FrameType) -> Any:
    match node:
        case ast.Name(id) | ast.Call(ast.Attribute(ast.Name(id), "item"), []) | ast.Call(ast.Name("int"), [ast.Name(id)]) if id == name:
            return value
        case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
            return [_side(part, name, value, frame) for part in parts]
    return MISSING if name in names_in(node) else _plain(value_of(node, frame))


def _finding(loop: ast.While, draw: ast.Assign, values: Sequence[Any], frame: FrameType) -> HangFinding:
    file, tree = frame.f_code.co_filename, tree_of(frame.f_code.co_filename)
    where, test = location(file, loop.lineno, frame.f_code.co_name), ast.unparse(loop.test)
    bounded = f"for _ in range({_ROUNDS}):\n    if not ({test}):\n        break\n    {ast.unparse(draw)}"
    source = None if tree is None else Source(where, tree)
    edits = () if source is None else (source.replacing(loop, bounded, old=source.text(loop, whole=True)),)
    shown = f"{values[0]!r} alone" if len(values) == 1 else f"one of {plural(len(values), 'value')}"
    return HangFinding(
        state="stuck",
        cause="infinite_loop",
        headline=f"`while {test}` never ends: `{ast.unparse(draw.value)}` can give {shown}, and the condition holds for all",
        location=where,
        fix=f"give up after some draws: `for _ in range({_ROUNDS}):` in place of `while {test}:`, and leave it by `break`",
        edits=edits,
        fix_state="compiles" if edits else "advice",
        reason="a loop that draws until a draw is right ends only if one can be",
    )
