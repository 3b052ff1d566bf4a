"""Numbers for each channel, such as the means of a normalization, of which there are more than channels."""

from __future__ import annotations

import ast
import copy
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from torchdebug_magics.format import plural
from torchdebug_magics.instruments.shapes.explain import refusal
from torchdebug_magics.instruments.shapes.report import Failure, Fix
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.source.edited_source import cells, exchanging, made_as
from torchdebug_magics.probing.source.syntax import called, nodes
from torchdebug_magics.probing.source.user_code import location
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.report import Edit

_COLORS, _MOST_CHANNELS = 3, 4
"""Of a picture."""
_STATISTICS = frozenset({"mean", "std", "means", "stds"})


def numbers_per_channel(error: BaseException) -> Failure | None:
    """An object with a number for each of some channels that was given a picture with one: it is made with one number, and tried."""
    if not isinstance(error, (RuntimeError, ValueError)):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, argument = frame.f_locals.get("self"), _picture(frame)
        numbers = {} if owner is None or argument is None else _numbers_of(owner)
        lengths = {len(value) for value in numbers.values()}
        is_of_colors = lengths == {_COLORS} and any(name.strip("_") in _STATISTICS for name in numbers)
        if argument is None or not is_of_colors or argument.shape[-3] != 1 or not _runs(frame, owner, numbers, argument):
            continue
        name, made = type(owner).__name__, list(_with_one_number(owner, list(numbers.values())))
        fixes = [Fix(code=made[0][0], verified=True, changes=tuple(edit for _, edit in made))] if made else []
        return refusal(error, f"`{name}` has numbers for {plural(lengths.pop(), 'channel')}, and gets a picture with 1", fixes=fixes)
    return None


def _picture(frame: FrameType) -> torch.Tensor | None:
    """The tensor that a method was given, if it is a picture of one channel or a batch of them."""
    names = inspect.getargvalues(frame).args
    given = [frame.f_locals.get(name) for name in names[1:2]] if names[:1] == ["self"] else []
    return next((value for value in given if isinstance(value, torch.Tensor) and value.dim() in {3, 4}), None)


def _numbers_of(owner: object) -> dict[str, Sequence[Any]]:
    """The attributes that are a few numbers each: tuples, lists or tensors of one dimension."""
    attributes = getattr(owner, "__dict__", {})
    known: dict[str, Sequence[Any]] = {}
    for name, value in list(attributes.items()) if type(attributes) is dict else ():
        values = value.tolist() if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) <= _MOST_CHANNELS else value
        if type(values) in {tuple, list} and 1 <= len(values) <= _MOST_CHANNELS and all(type(each) in {int, float} for each in values):
            known[name] = values
    return known


def _runs(frame: FrameType, owner: Any, numbers: Mapping[str, Sequence[Any]], argument: torch.Tensor) -> bool:
    """Whether the method that failed takes the picture with one number in the place of several."""
    method: Any = getattr(type(owner), frame.f_code.co_name, None)
    if getattr(method, "__code__", None) is not frame.f_code:
        return False
    try:
        other = copy.deepcopy(owner)
    except Exception:  # noqa: BLE001 - it holds what cannot be copied: then nothing is tried
        return False
    for name, values in numbers.items():
        own = vars(owner)[name]
        vars(other)[name] = own[:1] if isinstance(own, torch.Tensor) else values[:1]
    try:
        with modes_aside(), RandomState.kept(), torch.no_grad():
            method(other, argument.clone())
    except Exception:  # noqa: BLE001 - the answer
        return False
    return True


def _with_one_number(owner: object, numbers: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Edit]]:
    """Each call of the class in the cells with these very numbers, with the mean of them: its text, and the edit.

    Where the object has a variable of its own, the one that makes it.
    """
    known, kind, name = [list(values) for values in numbers], type(owner).__name__, variable_of(owner)
    own = [call for _, call in made_as("", name, kind)] if name else []
    for cell in cells():
        for call in [call for call in nodes(ast.Call, cell.tree) if called(call) == kind and (not own or call in own)]:
            literals = [_literal(value) for value in (*call.args, *(option.value for option in call.keywords))]
            if not any(literals) or any(literal not in known for literal in literals if literal is not None):
                continue
            args = [_mean_of(value) for value in call.args]
            new = ast.Call(call.func, args, [ast.keyword(option.arg, _mean_of(option.value)) for option in call.keywords])
            for edit in exchanging(location(cell.where.file, call.lineno, "<module>"), call, new):
                yield ast.unparse(new), edit


def _literal(value: ast.expr) -> list[Any] | None:
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return None
    return list(literal) if isinstance(literal, (tuple, list)) else None


def _mean_of(value: ast.expr) -> ast.expr:
    """A list or tuple of the mean of its numbers; any other expression as it is."""
    numbers = _literal(value)
    if not numbers:
        return value
    mean = ast.Constant(round(sum(numbers) / len(numbers), 4))
    return ast.List([mean]) if isinstance(value, ast.List) else ast.Tuple([mean])
