"""The op that raised, and what it was given, read from the frames of an error."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import operator
import sys
import textwrap
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.leaves import named_tensors
from torchdebug_magics.instruments.shapes.origins import Failed
from torchdebug_magics.instruments.shapes.reading import OPERATORS, Stand, UnreadableError, call_of, value_of
from torchdebug_magics.instruments.shapes.repair.source import site_of
from torchdebug_magics.probing.where import is_user_code, owner, span

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.replay import Replay

__all__ = ["failed_in"]


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
    name = frame.f_code.co_name
    taken = inspect.getargvalues(frame)
    is_method = isinstance(taken.locals.get("self"), torch.Tensor)
    func = getattr(torch.Tensor if is_method else sys.modules.get(frame.f_globals.get("__name__", "")), name, None)
    if not callable(func):
        return None
    values = {name: taken.locals[name] for name in taken.args if name in taken.locals}
    if taken.varargs is None and not is_method:
        return _failed(func, frame.f_code.co_name, (), values, error)
    places = taken.args[: frame.f_code.co_argcount]  # what stands before `*args` can be given by place alone
    args = (*(values.pop(name) for name in places if name in values), *taken.locals.get(taken.varargs or "", ()))
    return _failed(func, name, args, values, error)


def _of_expression(frame: FrameType, instruction: int, error: BaseException, replay: Replay) -> Failed | None:
    """A function of torch's own: the expression that was running is read again, without running any of it on data."""
    stand = Stand((frame.f_locals, frame.f_globals), replay)
    try:
        node = _running(frame, instruction)
        if isinstance(node, (ast.BinOp, ast.Compare)):
            return _of_operator(node, stand, error)
        if isinstance(node, ast.AugAssign):
            return _of_update(node, stand, error)
        if isinstance(node, ast.Subscript):
            return _of_subscript(node, stand, error, stores=dis.opname[frame.f_code.co_code[instruction]].startswith("STORE_"))
        if isinstance(node, ast.Call):
            return _of_call(node, stand, error)
    except (UnreadableError, SyntaxError):
        pass
    return None


def _of_operator(node: ast.BinOp | ast.Compare, stand: Stand, error: BaseException) -> Failed | None:
    sign, right = (node.op, node.right) if isinstance(node, ast.BinOp) else (node.ops[0], node.comparators[0])
    if type(sign) not in OPERATORS:
        return None
    name, func = OPERATORS[type(sign)]
    return _failed(func, name, (value_of(node.left, stand), value_of(right, stand)), {}, error, _texts(node.left, right))


def _of_update(node: ast.AugAssign, stand: Stand, error: BaseException) -> Failed | None:
    """``h += x``."""
    found = OPERATORS.get(type(node.op))
    target = value_of(node.target, stand)
    func = getattr(torch.Tensor, f"{found[0]}_", None) if found is not None else None
    if found is None or func is None or not isinstance(target, torch.Tensor):
        return None
    return _failed(func, f"{found[0]}_", (target, value_of(node.value, stand)), {}, error, _texts(node.target, node.value))


def _of_subscript(node: ast.Subscript, stand: Stand, error: BaseException, *, stores: bool) -> Failed | None:
    """``x[i]``, or ``x[i] = y``, of which the instruction that failed tells the place alone."""
    place = (value_of(node.value, stand), value_of(node.slice, stand))
    if not stores:
        return _failed(operator.getitem, "getitem", place, {}, error)
    site, _ = site_of(error)
    statement = site.statement if site is not None else None
    if not isinstance(statement, ast.Assign):
        return None
    return _failed(torch.Tensor.__setitem__, "setitem", (*place, value_of(statement.value, stand)), {}, error)


def _of_call(node: ast.Call, stand: Stand, error: BaseException) -> Failed | None:
    call = call_of(node, stand)
    if not callable(call.func) or isinstance(call.func, (type, torch.nn.Module)):
        return None
    return _failed(call.func, getattr(call.func, "__name__", ""), call.args, call.kwargs, error, _texts(*call.nodes))


def _failed(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException, texts: list[str] | None = None
) -> Failed | None:
    operands = tuple(named_tensors(args)) + tuple(named_tensors(kwargs))
    if not operands:
        return None
    if texts is not None and len(texts) == len(operands):
        operands = tuple((text, tensor) for text, (_, tensor) in zip(texts, operands, strict=True))
    return Failed(func, name, None, 0, args, kwargs, operands, (None,) * len(operands), error)


def _running(frame: FrameType, instruction: int) -> ast.AST | None:
    place = span(frame.f_code, instruction)
    if place is None:
        return None
    line, column, end_line, end_column = place
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(line, end_line + 1)]
    lines[-1] = lines[-1].encode()[:end_column].decode()
    lines[0] = lines[0].encode()[column:].decode()
    text = textwrap.dedent("".join(lines))
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:  # a statement, such as `h += x`
        return ast.parse(text).body[0]


def _texts(*nodes: ast.expr) -> list[str]:
    return [ast.unparse(node) for node in nodes]
