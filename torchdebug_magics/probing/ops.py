"""What ops are, by their schemas and ATen names: what they write, which only move numbers, which give memory that nobody has written."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_HIDDEN_WRITES = dict.fromkeys(
    ("native_batch_norm", "batch_norm", "instance_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)
"""Arguments that an op writes although its schema says no such thing."""
_MOVES = frozenset(
    [
        *("clone", "contiguous", "_to_copy", "to", "copy_", "detach", "cat", "stack", "index", "index_select", "gather"),
        *("expand", "repeat", "flip", "roll", "permute", "transpose", "t", "constant_pad_nd", "tril", "triu", "take"),
        *("take_along_dim", "masked_select", "unfold", "as_strided", "_unsafe_view", "_reshape_copy", "embedding"),
        *("slice_backward", "select_backward", "lift_fresh", "lift_fresh_copy", "split", "split_with_sizes", "unsafe_split"),
        *("unsafe_split_with_sizes", "unbind", "chunk", "slice_scatter", "select_scatter", "index_put", "index_put_"),
        *("_index_put_impl_", "masked_scatter", "scatter", "scatter_", "rot90", "pixel_shuffle"),
    ]
)
_OVERWRITES = frozenset(
    [
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_"),
        *("log_normal_", "eye_", "arange_"),
    ]
)
_WRITES_IN_PART = frozenset(["index_copy_", "index_fill_", "index_put_", "_index_put_impl_", "scatter_", "masked_fill_", "masked_scatter_"])
_UNINITIALISED = frozenset(
    [
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "_efficientzerotensor"),
        *("resize_", "resize_as_"),
    ]
)


def op_name(func: Any) -> str:
    """``aten.log.default`` -> ``log``; an op of another library keeps its namespace: ``torchvision::nms``."""
    schema: str = func._schema.name
    return schema.removeprefix("aten::")


def argument_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of an op's call by its name in the schema, its default where it was left out; None where there is none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def is_pointwise(func: Any) -> bool:
    """Whether each output element depends on the input elements at the same (broadcast) index alone."""
    return torch.Tag.pointwise in func.tags


def is_movement(func: Any) -> bool:
    """Whether the op only moves numbers, so that a bad output element is a bad input element."""
    return bool(getattr(func, "is_view", False)) or op_name(func) in _MOVES


def is_writing_in_part(func: Any) -> bool:
    """Whether the op leaves some of what it writes as it was, without a look at it."""
    return op_name(func) in _WRITES_IN_PART


def is_overwriting(func: Any) -> bool:
    """Whether all that the op writes is written anew, whatever was there before."""
    return op_name(func) in _OVERWRITES or func._overloadname.split("_")[-1] == "out"


def is_uninitialised(name: str) -> bool:
    """Whether the output is memory that nobody has written yet: never a birth."""
    return name in _UNINITIALISED


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op writes in place, also those its schema does not admit."""
    named, hidden = _writes(func)
    if hidden and argument_of(func, args, kwargs, "training") is not False:
        named += hidden
    tensors: list[torch.Tensor] = []
    for place, name in named:
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif value is not None:
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


@cache
def _writes(func: Any) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    """(place, name) of the arguments that the schema calls written, and of those that it hides."""
    arguments = list(enumerate(func._schema.arguments))
    hidden_names = _HIDDEN_WRITES.get(op_name(func), ())
    named = tuple((place, arg.name) for place, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)
    return named, tuple((place, arg.name) for place, arg in arguments if arg.name in hidden_names)
