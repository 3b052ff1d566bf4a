"""What is of another kind than is expected, and was made so elsewhere: a number for a loss, a function for a module, a length."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections import UserDict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchdebug_magics.instruments.shapes.cell_error.meanings import meanings
from torchdebug_magics.instruments.shapes.explain import edited
from torchdebug_magics.instruments.shapes.report import Failure
from torchdebug_magics.probing.names import user_variables
from torchdebug_magics.probing.source.call_sites import MISSING, function_node, value_of
from torchdebug_magics.probing.source.edited_source import Source, cells, exchanging
from torchdebug_magics.probing.source.syntax import (
    FUNCTIONS,
    bound_names,
    called,
    copied,
    exchanged,
    expression,
    method,
    nodes,
    read_names,
    statement_at,
    tree_of,
)
from torchdebug_magics.probing.source.user_code import is_user_code, local_values, location
from torchdebug_magics.report import Edit

_NO_NUMBERS = "'float' object has no attribute 'backward'"
_MOST_STEPS = re.compile(r"Tried to step (\d+) times\. The specified number of total steps is (\d+)")
_DEEPEST = 4


def of_another_kind(error: BaseException) -> Failure | None:
    """What was made of another kind than the line expects, where it was made; None where that is not why it raised."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame.f_code)]
    if not frames:
        return None
    if "dict" in str(error) and (batch := next(filter(None, (_batch_as_argument(error, *place) for place in frames)), None)) is not None:
        return batch
    if isinstance(error, AttributeError) and _NO_NUMBERS in str(error):
        return _read_out(error, *frames[-1])
    if isinstance(error, TypeError) and "is not a Module subclass" in str(error):
        return _function_for_module(error, frames[-1][0])
    counts = _MOST_STEPS.search(str(error)) if isinstance(error, ValueError) else None
    return _too_few_steps(error, [frame for frame, _ in frames], int(counts[2])) if counts is not None else None


def _batch_as_argument(error: BaseException, frame: FrameType, line: int) -> Failure | None:
    """A model that is given a mapping of its arguments as the first of them."""
    for call in nodes(ast.Call, statement_at(tree_of(frame.f_code.co_filename), line)):
        model = _seen(call.func, [frame], {}) if len(call.args) == 1 else None
        batch = _seen(call.args[0], [frame], {}) if isinstance(model, torch.nn.Module) else None
        wanted = list(inspect.signature(model.forward).parameters) if isinstance(model, torch.nn.Module) else []
        is_inside = any(inner.f_locals.get("self") is model for inner, _ in traceback.walk_tb(error.__traceback__))
        if is_inside and isinstance(batch, dict | UserDict) and len(wanted) > 1 and batch and {*batch} <= {*wanted}:
            new = ast.Call(call.func, [], [*call.keywords, ast.keyword(None, call.args[0])])
            edits = exchanging(location(frame.f_code.co_filename, line, frame.f_code.co_name), call, new)
            return edited(error, f"`{ast.unparse(call.args[0])}` is a dict of arguments, and is given as one of them", edits)
    return None


def _read_out(error: BaseException, frame: FrameType, line: int) -> Failure | None:
    """The calls of ``.item()`` in the functions that a number comes from, on which backward() is called."""
    file = frame.f_code.co_filename
    function, failing = function_node(frame.f_code), statement_at(tree_of(file), line)
    calls = [call for call in nodes(ast.Call, failing) if method(call) == "backward"]
    names = read_names(calls[0]) if calls else set[str]()
    edits = tuple(_without_reading(*place) for place in dict.fromkeys(_readers(names, function, line)))
    loss = ast.unparse(calls[0].func).removesuffix(".backward") if calls else ""
    return edited(error, f"`{loss}` is a number: `.item()` has left the graph behind", edits) if edits else None


def _readers(names: set[str], function: ast.AST | None, line: int, depth: int = 0) -> Iterator[tuple[Source, ast.stmt]]:
    """The statements with ``.item()`` in the functions that are called for the values of these names."""
    made = [node for node in nodes(ast.Assign, function) if bound_names(node) & names and node.lineno <= line]
    functions = {called(call) for node in made for call in nodes(ast.Call, node.value)}
    for cell in cells():
        for inner in (node for node in nodes(FUNCTIONS, cell.tree) if node.name in functions):
            returned = {name for node in nodes(ast.Return, inner) for name in read_names(node)}
            giving = (
                node for node in nodes((ast.Assign, ast.Return), inner) if isinstance(node, ast.Return) or bound_names(node) & returned
            )
            yield from ((cell, node) for node in giving if any(_read_by(call) is not None for call in ast.walk(node)))
    read = {name for node in made for name in read_names(node.value)} - names
    if read and depth < _DEEPEST:
        yield from _readers(read, function, line, depth + 1)


def _read_by(node: ast.AST) -> ast.expr | None:
    """The tensor of ``tensor.item()``."""
    is_reading = isinstance(node, ast.Call) and method(node) == "item" and not node.args
    return node.func.value if is_reading and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None


def _without_reading(cell: Source, statement: ast.stmt) -> Edit:
    return cell.replacing(statement, ast.unparse(exchanged(copied(statement), _read_by)))


def _function_for_module(error: BaseException, frame: FrameType) -> Failure | None:
    """A function that is given as a part of a container of modules: the module of its name."""
    function, file = function_node(frame.f_code), frame.f_code.co_filename
    heads = {call.func for call in nodes(ast.Call, function)}
    for node in nodes((ast.Attribute, ast.Name), function):
        value = value_of(node, frame, local_values(frame)) if node not in heads and isinstance(node.ctx, ast.Load) else MISSING
        meant = next((each for each in meanings(value) if "module is expected" in each.sentence), None) if callable(value) else None
        name = str(error).partition(" is not a Module")[0].rpartition(".")[2]
        if meant is not None and not isinstance(value, type) and getattr(value, "__name__", "") == name:
            code = meant.code.replace("torch.nn.", "nn.") if frame.f_globals.get("nn") is torch.nn else meant.code
            return edited(
                error, f"`{ast.unparse(node)}` {meant.sentence}", exchanging(location(file, node.lineno, ""), node, expression(code))
            )
    return None


def _too_few_steps(error: BaseException, frames: list[FrameType], count: int) -> Failure | None:
    """A division that leaves the last batch out, where the loader itself knows how many batches it gives."""
    values: dict[str, Any] = dict(user_variables())
    for cell in cells():
        for division in nodes(ast.BinOp, cell.tree):
            owners = [node.value for node in nodes(ast.Attribute, division.right) if node.attr == "batch_size"]
            is_of_length = isinstance(division.op, ast.FloorDiv) and called(division.left) == "len"
            named = [each for each in owners if is_of_length and isinstance(_seen(each, frames, values), DataLoader)]
            if not _gives_the_steps(division, cell):
                continue
            loaders = named or [ast.Name(name) for name, value in values.items() if is_of_length and isinstance(value, DataLoader)]
            for owner in loaders if len(loaders) == 1 else ():
                loader = _seen(owner, frames, values)
                if count % len(loader) == 0 or count % max(1, len(loader) - 1):
                    continue
                meant = expression(f"len({ast.unparse(owner)})")
                where = location(cell.where.file, division.lineno, "<module>")
                what = f"`{ast.unparse(owner)}` gives {len(loader)} batches, and `{ast.unparse(division)}` leaves the last one out"
                return edited(error, what, exchanging(where, division, meant))
    return None


def _gives_the_steps(division: ast.BinOp, cell: Source) -> bool:
    """Whether the number is an argument of the schedule, by itself or by its variable."""
    made = [node for node in nodes(ast.Assign, cell.tree) if any(part is division for part in ast.walk(node.value))]
    names = bound_names(*made) if made else set[str]()
    calls = [call for place in cells() for call in nodes(ast.Call, place.tree) if called(call) == "OneCycleLR"]
    return any(read_names(call) & names or any(part is division for part in ast.walk(call)) for call in calls)


def _seen(node: ast.expr, frames: list[FrameType], values: dict[str, Any]) -> Any:
    """What an expression stands for in one of the frames, or in the notebook."""
    values_seen = (value_of(node, frame, {**values, **local_values(frame)}) for frame in reversed(frames))
    return next((value for value in values_seen if value is not MISSING), MISSING)
