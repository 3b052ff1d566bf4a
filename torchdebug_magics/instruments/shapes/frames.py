"""The op that raised, and what it was given, read from the frames of an error."""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchdebug_magics.instruments.shapes.leaves import named_tensors
from torchdebug_magics.instruments.shapes.ops import Failed
from torchdebug_magics.probing.where import is_user_code, owner, span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.replay import Replay

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


_NUMBERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class _Unknown(Exception):  # noqa: N818 - it only ends a search
    """A part of an expression that cannot be read without running code of the user's."""


class _Stand(NamedTuple):
    """Where the user's code stood, and what its calls give without data."""

    names: tuple[Mapping[str, Any], ...]
    replay: Replay


def failed_in(error: BaseException, replay: Replay) -> Failed | None:
    """The call that raised; None where it was none of torch's, or its arguments cannot be read.

    Calls among its arguments are made again without data.
    """
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
        return next((found for frame in after if (found := _of_function(frame, error)) is not None), None)
    return _of_expression(trace.tb_frame, trace.tb_lasti, error, replay) if not after else None


def _of_function(frame: FrameType, error: BaseException) -> Failed | None:
    """A function of torch's that is written in Python: its frame holds its arguments."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    func = getattr(module, frame.f_code.co_name, None)
    if not callable(func):
        return None
    taken = inspect.getargvalues(frame)
    values = {name: taken.locals[name] for name in taken.args if name in taken.locals}
    return _failed(func, frame.f_code.co_name, (), values, error)


def _of_expression(frame: FrameType, instruction: int, error: BaseException, replay: Replay) -> Failed | None:
    """A function of torch's own: the expression that was running is read again, without running any of it on data."""
    stand = _Stand((frame.f_locals, frame.f_globals), replay)
    try:
        node = _running(frame, instruction)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            name, func = _OPERATORS[type(node.op)]
            return _failed(func, name, (_value(node.left, stand), _value(node.right, stand)), {}, error, _texts(node.left, node.right))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
            name, func = _OPERATORS[type(node.ops[0])]
            return _failed(func, name, (_value(node.left, stand), _value(node.comparators[0], stand)), {}, error)
        if isinstance(node, ast.Subscript):
            return _failed(operator.getitem, "getitem", (_value(node.value, stand), _value(node.slice, stand)), {}, error)
        if isinstance(node, ast.Call):
            return _of_call(node, stand, error)
    except (_Unknown, SyntaxError):
        pass
    return None


def _of_call(node: ast.Call, stand: _Stand, error: BaseException) -> Failed | None:
    args = [_value(one, stand) for one in node.args]
    kwargs = {one.arg: _value(one.value, stand) for one in node.keywords if one.arg is not None}
    texts = _texts(*node.args)
    if isinstance(node.func, ast.Attribute) and isinstance(own := _value(node.func.value, stand), torch.Tensor):
        func, args, texts = getattr(torch.Tensor, node.func.attr, None), [own, *args], [*_texts(node.func.value), *texts]
    else:
        func = _value(node.func, stand)
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


def _value(node: ast.expr, stand: _Stand) -> Any:
    """What an expression stands for, from names, attributes of modules and tensors, constants, and calls of torch's alone."""
    read = _READERS.get(type(node))
    if read is None:
        raise _Unknown
    return read(node, stand)


def _negative(node: ast.UnaryOp, stand: _Stand) -> Any:
    number = _value(node.operand, stand)
    if not isinstance(node.op, ast.USub) or not isinstance(number, (int, float)):
        raise _Unknown
    return -number


def _slice(node: ast.Slice, stand: _Stand) -> slice:
    return slice(*(None if one is None else _value(one, stand) for one in (node.lower, node.upper, node.step)))


def _attribute(node: ast.Attribute, stand: _Stand) -> Any:
    own = _value(node.value, stand)
    if isinstance(own, torch.Tensor) and node.attr in {"T", "mT", "H", "mH", "shape", "dtype", "device"}:
        return getattr(own, node.attr)
    if isinstance(own, torch.nn.Module):
        return _part(own, node.attr)
    names = vars(own) if hasattr(own, "__dict__") else {}
    if node.attr not in names:
        raise _Unknown
    return names[node.attr]


def _called(node: ast.Call, stand: _Stand) -> Any:
    args = [_value(one, stand) for one in node.args]
    kwargs = {one.arg: _value(one.value, stand) for one in node.keywords if one.arg is not None}
    own = _value(node.func.value, stand) if isinstance(node.func, ast.Attribute) else None
    if isinstance(own, torch.Tensor) and isinstance(node.func, ast.Attribute):
        func, args = getattr(torch.Tensor, node.func.attr, None), [own, *args]
    else:
        func = _value(node.func, stand)
    return _replayed(stand, func, tuple(args), kwargs)


def _computed(node: ast.BinOp, stand: _Stand) -> Any:
    left, right = _value(node.left, stand), _value(node.right, stand)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        whole = _NUMBERS.get(type(node.op))
        if whole is None:
            raise _Unknown
        return whole(left, right)
    if type(node.op) not in _OPERATORS:
        raise _Unknown
    return _replayed(stand, _OPERATORS[type(node.op)][1], (left, right), {})


def _replayed(stand: _Stand, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return stand.replay.call(func, args, kwargs)
    except LookupError:
        raise _Unknown from None


def _item(own: Any, key: Any, stand: _Stand) -> Any:
    """An element or a slice, where asking for it runs no code of the user's."""
    if isinstance(own, torch.Tensor) and not isinstance(key, str):
        return _replayed(stand, torch.Tensor.__getitem__, (own, key), {})
    if type(own) in {list, tuple, dict} or isinstance(own, (torch.Size, torch.nn.ModuleList, torch.nn.ModuleDict)):
        try:
            return own[key]
        except Exception:  # noqa: BLE001 - whatever a wrong key raises
            raise _Unknown from None
    raise _Unknown


def _named(name: str, stand: _Stand) -> Any:
    for names in stand.names:
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


_READERS: dict[type[ast.AST], Callable[[Any, _Stand], Any]] = {
    ast.Constant: lambda node, _: node.value,
    ast.Name: lambda node, stand: _named(node.id, stand),
    ast.Tuple: lambda node, stand: tuple(_value(one, stand) for one in node.elts),
    ast.List: lambda node, stand: [_value(one, stand) for one in node.elts],
    ast.UnaryOp: _negative,
    ast.Slice: _slice,
    ast.Subscript: lambda node, stand: _item(_value(node.value, stand), _value(node.slice, stand), stand),
    ast.Attribute: _attribute,
    ast.Call: _called,
    ast.BinOp: _computed,
}
