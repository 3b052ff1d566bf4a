"""The op that raised, and what it was given, read from the frames of an error."""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import sys
import textwrap
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.instruments.shapes.leaves import named_tensors
from torchdebug_magics.instruments.shapes.ops import Failed
from torchdebug_magics.probing.where import is_user_code, owner, span

__all__ = ["failed_in"]

_OPERATORS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {
    ast.MatMult: ("matmul", torch.matmul),
    ast.Add: ("add", torch.add),
    ast.Sub: ("sub", torch.sub),
    ast.Mult: ("mul", torch.mul),
    ast.Div: ("div", torch.div),
    ast.Pow: ("pow", torch.pow),
    ast.Lt: ("lt", torch.lt),
    ast.Gt: ("gt", torch.gt),
    ast.LtE: ("le", torch.le),
    ast.GtE: ("ge", torch.ge),
    ast.BitAnd: ("bitwise_and", torch.bitwise_and),
    ast.BitOr: ("bitwise_or", torch.bitwise_or),
}


class _Unknown(Exception):  # noqa: N818 - it only ends a search
    """A part of an expression that cannot be read without running code of the user's."""


def failed_in(error: BaseException) -> Failed | None:
    """The call that raised; None where it was none of torch's, or its arguments cannot be read."""
    frames = list(traceback.walk_tb(error.__traceback__))
    places = [at for at, (frame, _) in enumerate(frames) if is_user_code(frame.f_code)]
    if not places:
        return None
    after = [frame for frame, _ in frames[places[-1] + 1 :]]
    trace = error.__traceback__
    for _ in range(places[-1]):
        trace = trace.tb_next if trace is not None else None
    if trace is None:
        return None
    if after and owner(after[0].f_code.co_filename) == "torch":
        return _of_function(after[0], error)
    return _of_expression(trace.tb_frame, trace.tb_lasti, error) if not after else None


def _of_function(frame: FrameType, error: BaseException) -> Failed | None:
    """A function of torch's that is written in Python: its frame holds its arguments."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    func = getattr(module, frame.f_code.co_name, None)
    if not callable(func):
        return None
    taken = inspect.getargvalues(frame)
    values = {name: taken.locals[name] for name in taken.args if name in taken.locals}
    return _failed(func, frame.f_code.co_name, (), values, error)


def _of_expression(frame: FrameType, instruction: int, error: BaseException) -> Failed | None:
    """A function of torch's own: the expression that was running is read again, without running any of it."""
    try:
        node = _running(frame, instruction)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            name, func = _OPERATORS[type(node.op)]
            return _failed(func, name, (_value(node.left, frame), _value(node.right, frame)), {}, error, _texts(node.left, node.right))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
            name, func = _OPERATORS[type(node.ops[0])]
            return _failed(func, name, (_value(node.left, frame), _value(node.comparators[0], frame)), {}, error)
        if isinstance(node, ast.Subscript):
            return _failed(operator.getitem, "getitem", (_value(node.value, frame), _value(node.slice, frame)), {}, error)
        if isinstance(node, ast.Call):
            return _of_call(node, frame, error)
    except (_Unknown, SyntaxError):
        pass
    return None


def _of_call(node: ast.Call, frame: FrameType, error: BaseException) -> Failed | None:
    args = [_value(one, frame) for one in node.args]
    kwargs = {one.arg: _value(one.value, frame) for one in node.keywords if one.arg is not None}
    texts = _texts(*node.args)
    if isinstance(node.func, ast.Attribute) and isinstance(own := _value(node.func.value, frame), torch.Tensor):
        func, args, texts = getattr(torch.Tensor, node.func.attr, None), [own, *args], [*_texts(node.func.value), *texts]
    else:
        func = _value(node.func, frame)
    if not callable(func) or isinstance(func, (type, torch.nn.Module)):
        return None
    return _failed(func, getattr(func, "__name__", ""), tuple(args), kwargs, error, texts)


def _failed(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException, texts: list[str] | None = None
) -> Failed | None:
    operands = tuple(named_tensors(args)) + tuple(named_tensors(kwargs))
    if not operands:
        return None
    if texts is not None and len(texts) == len(operands):
        operands = tuple((text, tensor) for text, (_, tensor) in zip(texts, operands, strict=True))
    return Failed(func, name, None, 0, args, kwargs, operands, (None,) * len(operands), error)


def _running(frame: FrameType, instruction: int) -> ast.expr | None:
    place = span(frame.f_code, instruction)
    if place is None:
        return None
    line, column, end_line, end_column = place
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(line, end_line + 1)]
    lines[-1] = lines[-1].encode()[:end_column].decode()
    lines[0] = lines[0].encode()[column:].decode()
    return ast.parse(f"({textwrap.dedent(''.join(lines))}\n)", mode="eval").body


def _value(node: ast.expr, frame: FrameType) -> Any:  # noqa: C901, PLR0911 - one case a kind of expression
    """What an expression stands for, from names, attributes of modules and tensors, and constants alone."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _named(node.id, frame)
        case ast.Tuple() | ast.List():
            values = [_value(one, frame) for one in node.elts]
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.UnaryOp(op=ast.USub()) if isinstance(number := _value(node.operand, frame), (int, float)):
            return -number
        case ast.Slice():
            return slice(*(None if one is None else _value(one, frame) for one in (node.lower, node.upper, node.step)))
        case ast.Subscript():
            return _item(_value(node.value, frame), _value(node.slice, frame))
        case ast.Attribute():
            own = _value(node.value, frame)
            if isinstance(own, torch.Tensor) and node.attr in {"T", "mT", "H", "mH"}:
                return getattr(own, node.attr)
            if isinstance(own, torch.nn.Module):
                return _part(own, node.attr)
            found = vars(own).get(node.attr) if hasattr(own, "__dict__") else None
            if found is not None:
                return found
    raise _Unknown


def _item(own: Any, key: Any) -> Any:
    """An element or a slice, where asking for it runs no code of the user's."""
    if type(own) in {list, tuple, dict} or isinstance(own, (torch.Tensor, torch.nn.ModuleList, torch.nn.ModuleDict)):
        try:
            return own[key]
        except Exception:  # noqa: BLE001 - whatever a wrong key raises
            raise _Unknown from None
    raise _Unknown


def _named(name: str, frame: FrameType) -> Any:
    for names in (frame.f_locals, frame.f_globals):
        if name in names:
            return names[name]
    raise _Unknown


def _part(module: torch.nn.Module, name: str) -> Any:
    own = module.__dict__
    for table in (own, own["_parameters"], own["_buffers"], own["_modules"]):
        if name in table:
            return table[name]
    raise _Unknown


def _texts(*nodes: ast.expr) -> list[str]:
    return [ast.unparse(node) for node in nodes]
