"""What a value may have been meant to be, by its type alone: a method its result, a list of tensors a tensor, a loader its iterator."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from torchdebug_magics.format import shape


class Meaning(NamedTuple):
    """What to write for an expression, and what its value is."""

    code: str
    """With ``{}`` for the expression."""
    sentence: str
    is_choice: bool = False
    """Whether it is one part of several: if another one would do as well, nobody knows which was meant."""


_FEW = 12
"""Keys of a dict that are told from each other."""


def meanings(value: Any) -> Iterator[Meaning]:
    """The likeliest first; none for a value that is not of a known type."""
    for kinds, ways in _TABLE:
        if isinstance(value, kinds):
            yield from ways if isinstance(ways, tuple) else ways(value)
            return
    if isinstance(value, type) and not issubclass(value, BaseException):
        yield Meaning("{}()", "is a class, where an instance of it is expected")
    elif inspect.isgenerator(value):
        yield Meaning("list({})", "is a generator, which is read once and in order")
    elif hasattr(type(value), "iloc"):
        yield Meaning("{}.iloc", "is indexed by its labels, and not by position")
        yield Meaning("{}.to_numpy()", f"is a {type(value).__name__}, where an array is expected")


def _of_function(value: Any) -> Iterator[Meaning]:
    name = getattr(value, "__name__", "").replace("_", "").lower()
    modules = [each for each, kind in vars(torch.nn).items() if each.lower() == name and isinstance(kind, type)]
    yield from (Meaning(f"torch.nn.{module}()", "is a function, where a module is expected") for module in modules)
    yield Meaning("{}()", "is a function, and is not called")


def _of_text(value: str) -> Iterator[Meaning]:
    try:
        number = ast.literal_eval(value.strip())
    except (SyntaxError, ValueError):
        return
    if type(number) in {int, float}:
        yield Meaning(f"{type(number).__name__}({{}})", "is text, where a number is expected")


def _of_list(value: list[Any]) -> Iterator[Meaning]:
    if len(value) == 1:
        yield Meaning("{}[0]", "is a list of one item")
    if value and all(isinstance(item, torch.Tensor) for item in value):
        sizes = {tuple(item.shape) for item in value}
        of = shape(next(iter(sizes)))
        if len(sizes) == 1:
            for code in (
                "torch.stack({})",
                "torch.stack({}, 1)",
                "torch.stack({}, 1).float()",
            ):  # a list that was collated has the batch second
                yield Meaning(code, f"is a list of {len(value)} tensors{f' of {of}' if of else ''}, and not a tensor")
        else:
            yield Meaning(
                "torch.nn.utils.rnn.pad_sequence({}, batch_first=True)", "is a list of tensors of unequal sizes, and not a tensor"
            )
    elif value and all(isinstance(row, (list, tuple)) for row in value) and len(set(map(len, value))) > 1:
        rows = "torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in {}], batch_first=True)"
        yield Meaning(rows, f"has rows of {min(map(len, value))} to {max(map(len, value))} values")
    else:
        yield Meaning("torch.tensor({})", "is a list, where a tensor is expected")


def _of_tuple(value: tuple[Any, ...]) -> Iterator[Meaning]:
    for place, item in enumerate(value[:_FEW]):
        if isinstance(item, torch.Tensor) or len(value) == 1:
            yield Meaning(f"{{}}[{place}]", f"is a tuple of {len(value)}", is_choice=len(value) > 1)


def _of_array(value: np.ndarray[Any, Any]) -> Iterator[Meaning]:
    if any(step < 0 for step in value.strides):
        yield Meaning("{}.copy()", "is a flipped view of an array, of which torch cannot be a view")
    if value.dtype == object:
        yield Meaning("{}.astype('float32')", "is an array of Python objects")
    yield Meaning("torch.from_numpy({})", "is a NumPy array, where a tensor is expected")
    yield Meaning("torch.from_numpy({}).float()", "is a NumPy array, where a tensor is expected")
    yield Meaning("{}.tolist()", "is a NumPy array")


def _of_tensor(value: torch.Tensor) -> Iterator[Meaning]:
    for code in ("{}.item()", "{}.numpy()") if value.numel() == 1 else ("{}.numpy()", "{}.tolist()"):
        yield Meaning(code, f"is a tensor{f' of {shape(tuple(value.shape))}' if value.dim() else ''}")


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[Meaning]:
    keys = [key for key in value if isinstance(key, str)]
    prefixes = {key.partition(".")[0] for key in keys}
    if len(prefixes) == 1 and all("." in key for key in keys):
        prefix = f"{prefixes.pop()}."
        yield Meaning(f"{{{{key.removeprefix({prefix!r}): value for key, value in {{}}.items()}}}}", f"has `{prefix}` before each name")
    for key in keys:
        if isinstance(value[key], (Mapping, torch.nn.Module, torch.Tensor)) and len(keys) <= _FEW:
            yield Meaning(f"{{}}[{key!r}]", f"is a dict: {', '.join(f'`{name}`' for name in keys[:4])}", is_choice=True)
    yield Meaning("{}.items()", "is a dict, of which a loop gives the keys alone")


_UNCALLED = Meaning("{}()", "is a method, and is not called")
_TABLE: tuple[tuple[Any, Callable[[Any], Iterable[Meaning]] | tuple[Meaning, ...]], ...] = (
    ((MethodType, BuiltinMethodType), lambda value: _of_function(value) if getattr(value, "__self__", None) is None else [_UNCALLED]),
    ((FunctionType, BuiltinFunctionType), _of_function),
    (str, _of_text),
    (list, _of_list),
    (tuple, _of_tuple),
    (np.ndarray, _of_array),
    (torch.Tensor, _of_tensor),
    (float, (Meaning("int({})", "is a float, where an integer is expected"),)),
    (
        (torch.nn.ModuleList, torch.nn.ModuleDict),
        (Meaning("torch.nn.Sequential(*{})", "only holds modules, and cannot be called"),),
    ),
    (torch.nn.Module, (Meaning("{}.parameters()", "is a module, where its parameters are expected"),)),
    (
        DataLoader,
        (
            Meaning("iter({})", "is a DataLoader, and not its iterator"),
            Meaning("{}.dataset", "is a DataLoader, and not its dataset"),
        ),
    ),
    (Mapping, _of_mapping),
    ((zip, map, filter), lambda value: [Meaning("list({})", f"is a {type(value).__name__}, which is read once and in order")]),
)
