"""What an expression of the user's stands for, read in the frame where it stood, without running code of the user's."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.replay import Replay

__all__ = ["OPERATORS", "Called", "Stand", "UnreadableError", "call_of", "value_of"]

OPERATORS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {
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
    ast.Eq: ("eq", torch.eq),
    ast.NotEq: ("ne", torch.ne),
    ast.BitAnd: ("bitwise_and", torch.bitwise_and),
    ast.BitOr: ("bitwise_or", torch.bitwise_or),
}
_NUMBERS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class UnreadableError(Exception):
    """A part of an expression that cannot be read without running code of the user's."""


class Stand(NamedTuple):
    """Where the user's code stood, and what its calls give without data."""

    names: tuple[Mapping[str, Any], ...]
    replay: Replay


class Called(NamedTuple):
    """A call, with what it is given."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nodes: list[ast.expr]
    """What is written for each of `args`."""


def value_of(node: ast.expr, stand: Stand) -> Any:
    """What an expression stands for, from names, attributes of modules and tensors, constants, and calls of torch's alone."""
    read = _READERS.get(type(node))
    if read is None:
        raise UnreadableError
    return read(node, stand)


def call_of(node: ast.Call, stand: Stand) -> Called:
    """A call that is written there, not made yet; a method of a tensor is a function of `torch.Tensor`'s."""
    args = [value_of(one, stand) for one in node.args]
    kwargs = {one.arg: value_of(one.value, stand) for one in node.keywords if one.arg is not None}
    if isinstance(node.func, ast.Attribute) and isinstance(own := value_of(node.func.value, stand), torch.Tensor):
        func = getattr(torch.Tensor, node.func.attr, None)
        return Called(func, (own, *args), kwargs, [node.func.value, *node.args])
    return Called(value_of(node.func, stand), tuple(args), kwargs, node.args)


def _negative(node: ast.UnaryOp, stand: Stand) -> Any:
    number = value_of(node.operand, stand)
    if not isinstance(node.op, ast.USub) or not isinstance(number, (int, float)):
        raise UnreadableError
    return -number


def _slice(node: ast.Slice, stand: Stand) -> slice:
    return slice(*(None if one is None else value_of(one, stand) for one in (node.lower, node.upper, node.step)))


def _attribute(node: ast.Attribute, stand: Stand) -> Any:
    own = value_of(node.value, stand)
    if isinstance(own, torch.Tensor) and node.attr in {"T", "mT", "H", "mH", "shape", "dtype", "device"}:
        return getattr(own, node.attr)
    if isinstance(own, torch.nn.Module):
        return _part(own, node.attr)
    names = vars(own) if hasattr(own, "__dict__") else {}
    if node.attr not in names:
        raise UnreadableError
    return names[node.attr]


def _called(node: ast.Call, stand: Stand) -> Any:
    if (held := _held(node, stand)) is not None:
        return held
    call = call_of(node, stand)
    return _replayed(stand, call.func, call.args, call.kwargs)


def _held(node: ast.Call, stand: Stand) -> list[Any] | None:
    """``list(parts)``, ``parts.values()``: what a container holds, where asking for it runs no code of the user's."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "values" and not node.args:
        own = value_of(node.func.value, stand)
        return list(own.values()) if type(own) is dict else None
    if isinstance(node.func, ast.Name) and node.func.id in {"list", "tuple"} and len(node.args) == 1 and not _is_named(node.func.id, stand):
        return _elements(value_of(node.args[0], stand))
    return None


def _is_named(name: str, stand: Stand) -> bool:
    return any(name in names for names in stand.names)


def _elements(value: Any) -> list[Any]:
    if type(value) not in {list, tuple} and not isinstance(value, torch.nn.ModuleList):
        raise UnreadableError
    return list(value)


def _comprehension(node: ast.ListComp, stand: Stand) -> list[Any]:
    """``[f(x) for x in xs]``."""
    one = node.generators[0]
    if len(node.generators) > 1 or one.ifs or one.is_async or not isinstance(one.target, ast.Name):
        raise UnreadableError
    name = one.target.id
    return [value_of(node.elt, stand._replace(names=({name: value}, *stand.names))) for value in _elements(value_of(one.iter, stand))]


def _computed(node: ast.BinOp, stand: Stand) -> Any:
    left, right = value_of(node.left, stand), value_of(node.right, stand)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        whole = _NUMBERS.get(type(node.op))
        if whole is None:
            raise UnreadableError
        return whole(left, right)
    if type(node.op) not in OPERATORS:
        raise UnreadableError
    return _replayed(stand, OPERATORS[type(node.op)][1], (left, right), {})


def _replayed(stand: Stand, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return stand.replay.call(func, args, kwargs)
    except LookupError:
        raise UnreadableError from None


def _item(own: Any, key: Any, stand: Stand) -> Any:
    """An element or a slice, where asking for it runs no code of the user's."""
    if isinstance(own, torch.Tensor) and not isinstance(key, str):
        return _replayed(stand, torch.Tensor.__getitem__, (own, key), {})
    if type(own) in {list, tuple, dict} or isinstance(own, (torch.Size, torch.nn.ModuleList, torch.nn.ModuleDict)):
        try:
            return own[key]
        except Exception:  # noqa: BLE001 - whatever a wrong key raises
            raise UnreadableError from None
    raise UnreadableError


def _named(name: str, stand: Stand) -> Any:
    for names in stand.names:
        if name in names:
            return names[name]
    raise UnreadableError


def _part(module: torch.nn.Module, name: str) -> Any:
    own = module.__dict__
    for table in (own, own["_parameters"], own["_buffers"], own["_modules"]):
        if name in table:
            return table[name]
    raise UnreadableError


_READERS: dict[type[ast.AST], Callable[[Any, Stand], Any]] = {
    ast.Constant: lambda node, _: node.value,
    ast.Name: lambda node, stand: _named(node.id, stand),
    ast.Tuple: lambda node, stand: tuple(value_of(one, stand) for one in node.elts),
    ast.List: lambda node, stand: [value_of(one, stand) for one in node.elts],
    ast.ListComp: _comprehension,
    ast.UnaryOp: _negative,
    ast.Slice: _slice,
    ast.Subscript: lambda node, stand: _item(value_of(node.value, stand), value_of(node.slice, stand), stand),
    ast.Attribute: _attribute,
    ast.Call: _called,
    ast.BinOp: _computed,
}
