"""What real ops ask of sizes, dtypes and indices, and fake ones do not: the op itself is asked.

Where an op looks things up, it is asked on the whole numbers that are known, and on zeros. Where operands differ in their dtypes, or have
unusual ones, it is asked once for these, on a few elements each. Where it writes into what `expand` has left, it is asked about that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torchdebug_magics.probing.dry_runs.faking import Fakes, ValueFailure
from torchdebug_magics.probing.dry_runs.inputs import rebuilt

_SMALL = 1 << 20
"""Elements up to which it is cheap to ask."""
_MANY = 1 << 24
_MASKS = frozenset([torch.bool, torch.uint8])
_WHOLE = frozenset([torch.int64, torch.int32])
_USUAL = frozenset([torch.float32, torch.float64])
_INDEXED: dict[str, tuple[int, int | None, int]] = {
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), (0, None, 1)),
    **dict.fromkeys(("gather", "index_select", "index_copy", "index_copy_", "index_add", "index_add_"), (0, 1, 2)),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), (0, 1, 2)),
}
"""Where the table, the dimension that is indexed (or None for the first) and the index stand, by op."""
_BY_TENSORS = frozenset(["index", "index_put", "index_put_"])
_LOSSES = frozenset(["nll_loss_forward", "nll_loss2d_forward"])
_LOOKS_UP = frozenset([*_INDEXED, *_BY_TENSORS, *_LOSSES, "take", "masked_scatter", "masked_scatter_"])
_MOVES = {
    *("cat", "stack", "clone", "copy", "_to_copy", "repeat", "where", "masked_fill", "fill"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "eq", "ne", "_local_scalar_dense", "arange"),
}
"""Ops that take any dtype, and may make much of little."""
_OF_DTYPES = r"type|not implemented for|support|must be long"
"""What torch says where it refuses dtypes, whatever the sizes are."""


def check_strictly(fakes: Fakes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what torch would raise for real operands."""
    name = func._schema.name.partition("::")[2]
    if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and _overlaps(args[0]):
        _ask(func, args, kwargs, lambda fake: torch.zeros((), dtype=fake.dtype).expand(fake.shape), "single memory location")
    _check_dtypes(fakes, name, func, args, kwargs)
    if name in _LOOKS_UP or _is_out_of_range(name, args):
        with unset_fake_temporarily():
            if _is_quick(fakes, args) or any(_is_beyond(index, low, high) for index, low, high in _limits(fakes.value, name, args)):
                _ask_with_values(fakes.value, func, args, kwargs)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one, as `expand` leaves them."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) and tensor.numel() <= _SMALL


def _check_dtypes(fakes: Fakes, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Ask once for the same dtypes: on two elements a dimension, and on all where these are few: sizes may be arguments, too."""
    tensors = [argument for argument in args if isinstance(argument, FakeTensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) < 2 and _USUAL.issuperset(dtypes):  # noqa: PLR2004 - they differ
        return
    question = func, tuple(argument.dtype if isinstance(argument, FakeTensor) else type(argument) for argument in args)
    if question in fakes.asked or _only_moves(name, func):
        return
    fakes.asked.add(question)
    if any(tensor.fake_device.type == "meta" for tensor in tensors) or all(fakes.value(tensor) is not None for tensor in tensors):
        return  # what is known is computed anyway
    few = (*args[:8], 1) if name == "convolution" else args  # in one group
    _ask(func, few, kwargs, _few, _OF_DTYPES)
    is_on_cpu = all(tensor.fake_device.type == "cpu" for tensor in tensors)  # which may have no kernel where another device has one
    if is_on_cpu and sum(tensor.numel() for tensor in tensors) <= _SMALL:
        _ask_with_values(lambda _: None, func, args, kwargs, _OF_DTYPES)


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Two elements a dimension, on its own device: each has kernels of its own."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return torch.zeros([min(size, 2) for size in tensor.shape], dtype=tensor.dtype, device=device)


def _only_moves(name: str, func: Any) -> bool:
    is_view = not func._schema.is_mutable and any(output.alias_info is not None for output in func._schema.returns)
    return is_view or name in _MOVES or torch.Tag.nondeterministic_seeded in func.tags


def _is_out_of_range(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a number among the arguments is more than there is."""
    if name == "multinomial":
        return bool(args[0].dim()) and args[1] > args[0].shape[-1] and not any(args[2:3])
    return name == "_softmax" and not -max(args[0].dim(), 1) <= args[1] < max(args[0].dim(), 1)


def _is_quick(fakes: Fakes, args: tuple[Any, ...]) -> bool:
    """Whether there are few elements, and no mask of unknown values, which may name any number of places."""
    tensors = [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
    tensors = [item for item in tensors if isinstance(item, torch.Tensor)]
    return all(tensor.numel() <= _SMALL and (tensor.dtype not in _MASKS or fakes.value(tensor) is not None) for tensor in tensors)


def _limits(value: Callable[[Any], Any], name: str, args: tuple[Any, ...]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """(known index, smallest allowed, first that is not) for each."""
    if name in _INDEXED:
        table, dimension, index = _INDEXED[name]
        sizes = args[table].shape
        length = sizes[args[dimension] if dimension is not None else 0] if sizes else 1
        if (known := value(args[index])) is not None:
            yield known, 0, length
    elif name in _LOSSES:
        classes, ignored = args[0].shape[1 if args[0].dim() > 1 else 0], args[4]
        if (known := value(args[1])) is not None:
            yield known[known != ignored], 0, classes
    elif name in _BY_TENSORS:
        for length, index in zip(args[0].shape, args[1], strict=False):
            if isinstance(index, torch.Tensor) and index.dtype in _WHOLE and (known := value(index)) is not None:
                yield known, -length, length


def _is_beyond(index: torch.Tensor, low: int, high: int) -> bool:
    if not index.numel() or not isinstance(high, int):
        return False
    smallest, largest = torch.aminmax(index)
    return bool(smallest < low) or bool(largest >= high)


def _ask(func: Any, args: Any, kwargs: dict[str, Any], real: Callable[[torch.Tensor], torch.Tensor], said: str = "") -> None:
    """Call the op itself, with real tensors for its own; what it refuses, where it says this, is raised as a `ValueFailure`."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            func(*rebuilt(args, real), **rebuilt(kwargs, real))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        if re.search(said, str(error)):
            raise ValueFailure(error) from None


def _ask_with_values(value: Callable[[Any], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], said: str = "") -> None:
    """On zeros, and on those numbers that are known."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = value(tensor)
        if known is not None:
            return known.clone() if func._schema.is_mutable else known  # it may come through, and is not to write into what is known
        zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return zeros.contiguous() if func._schema.is_mutable and tensor.numel() <= _MANY else zeros

    _ask(func, args, kwargs, real, said)
