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
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.shapes.leaves import named_tensors
from torchdebug_magics.instruments.shapes.origins import Failed
from torchdebug_magics.instruments.shapes.reading import OPERATORS, Stand, UnreadableError, call_of, value_of
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
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    func = getattr(module, frame.f_code.co_name, None)
    if not callable(func):
        return None
    taken = inspect.getargvalues(frame)
    values = {name: taken.locals[name] for name in taken.args if name in taken.locals}
    return _failed(func, frame.f_code.co_name, (), values, error)


def _of_expression(frame: FrameType, instruction: int, error: BaseException, replay: Replay) -> Failed | None:
    """A function of torch's own: the expression that was running is read again, without running any of it on data."""
    stand = Stand((frame.f_locals, frame.f_globals), replay)
    try:
        node = _running(frame, instruction)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            name, func = OPERATORS[type(node.op)]
            return _failed(func, name, (value_of(node.left, stand), value_of(node.right, stand)), {}, error, _texts(node.left, node.right))
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            name, func = OPERATORS[type(node.ops[0])]
            return _failed(func, name, (value_of(node.left, stand), value_of(node.comparators[0], stand)), {}, error)
        if isinstance(node, ast.Subscript):
            return _failed(operator.getitem, "getitem", (value_of(node.value, stand), value_of(node.slice, stand)), {}, error)
        if isinstance(node, ast.Call):
            return _of_call(node, stand, error)
    except (UnreadableError, SyntaxError):
        pass
    return None


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


def _running(frame: FrameType, instruction: int) -> ast.expr | None:
    place = span(frame.f_code, instruction)
    if place is None:
        return None
    line, column, end_line, end_column = place
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(line, end_line + 1)]
    lines[-1] = lines[-1].encode()[:end_column].decode()
    lines[0] = lines[0].encode()[column:].decode()
    return ast.parse(f"({textwrap.dedent(''.join(lines))}\n)", mode="eval").body


def _texts(*nodes: ast.expr) -> list[str]:
    return [ast.unparse(node) for node in nodes]
