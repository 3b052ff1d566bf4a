"""What real ops ask of sizes and dtypes, and fake ones do not: suspicious operands are put to the op itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torchdebug_magics.probing.dry_runs.faking import Fakes, ValueFailure
from torchdebug_magics.probing.dry_runs.inputs import rebuilt

_IN_PLACE = ("mul_", "add_", "sub_", "div_")
_COMPARISONS = ("gt", "lt", "ge", "le")
_OF_ONE_DTYPE = ("index_add", "index_add_", "native_layer_norm", "grid_sampler_2d", "grid_sampler_3d", "_cdist_forward")
_INDEX_PUT = ("index_put", "index_put_")
_SMALL = 1 << 20
"""Elements up to which it is cheap to ask."""
# Where the table, the dimension that is indexed (or None for the first) and the index stand, by op.
_INDEXED: dict[str, tuple[int, int | None, int]] = {
    "embedding": (0, None, 1),
    "_embedding_bag": (0, None, 1),
    "_embedding_bag_forward_only": (0, None, 1),
    "gather": (0, 1, 2),
    "index_select": (0, 1, 2),
    "scatter": (0, 1, 2),
    "scatter_": (0, 1, 2),
    "scatter_add": (0, 1, 2),
    "scatter_add_": (0, 1, 2),
    "index_add": (0, 1, 2),
    "index_add_": (0, 1, 2),
    "index_copy": (0, 1, 2),
    "index_copy_": (0, 1, 2),
}
_BY_TENSORS = ("index", "index_put", "index_put_")
_BY_MASK = ("masked_scatter", "masked_scatter_")
_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_MANY = 1 << 24
_USUAL = frozenset([torch.float32, torch.float64])
_SAID = r"not implemented for|(is|are) not supported|only supports|not support"
_MOVES = frozenset(
    [
        *("cat", "stack", "clone", "copy", "_to_copy", "repeat", "index", "index_select", "gather", "where", "masked_fill", "fill"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "eq", "ne", "_local_scalar_dense", "arange"),
    ]
)
"""Ops that take any dtype, and may make much of little."""
# Where the tensors to be multiplied stand, by op.
_FACTORS = {
    "mm": (0, 1),
    "addmm": (0, 1, 2),
    "bmm": (0, 1),
    "baddbmm": (0, 1, 2),
    "mv": (0, 1),
    "addmv": (0, 1, 2),
    "dot": (0, 1),
    "convolution": (0, 1, 2),
    "_trilinear": (0, 1, 2),
    "binary_cross_entropy": (0, 1),
}
# Where the index stands, by op.
_INDEX_ARGUMENTS = {"embedding": 1, "embedding_bag": 1, "gather": 2, "index_select": 2}


def check_strictly(fakes: Fakes, func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would raise for real operands of these sizes and dtypes."""
    name = func._schema.name.partition("::")[2]
    if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and _overlaps(args[0]):
        _write(func, args)
    suspected = _SUSPICIONS.get(name)
    if (
        suspected is not None
        and suspected(args)
        and all(argument.numel() <= _SMALL for argument in args if isinstance(argument, torch.Tensor))
    ):
        with unset_fake_temporarily():
            if name not in _INDEX_PUT or _are_whole(fakes, args[1]):
                _ask_with_values(fakes.value, func, args)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one, as `expand` leaves them."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) and tensor.numel() <= _SMALL


def _write(func: Any, args: tuple[Any, ...]) -> None:
    def real(one: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=one.dtype).expand(one.shape) if one is args[0] else torch.zeros(one.shape, dtype=one.dtype)

    _ask(func, args, real, "single memory location")


def _are_whole(fakes: Fakes, indices: Any) -> bool:
    """Whether it is known how many places they name: a mask of unknown values may name any number."""
    given = [index for index in indices if isinstance(index, torch.Tensor)]
    return all(one.dtype in {torch.int64, torch.int32} or fakes.value(one) is not None for one in given)


def _differ_in_dtype(args: tuple[Any, ...]) -> bool:
    """A norm of half precision may have weights of full precision: the check then succeeds."""
    return len({argument.dtype for argument in args if isinstance(argument, torch.Tensor) and argument.is_floating_point()}) > 1


def _cannot_hold(args: tuple[Any, ...]) -> bool:
    return len(args) > 1 and not torch.can_cast(torch.result_type(args[0], args[1]), args[0].dtype)


def _are_complex(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, torch.Tensor) and argument.is_complex() for argument in args)


def _differ_in_pixels(args: tuple[Any, ...]) -> bool:
    scores, target = args[:2]
    return tuple(target.shape) != (scores.shape[0], *scores.shape[2:])


def _draws_too_many(args: tuple[Any, ...]) -> bool:
    return bool(args[0].dim()) and args[1] > args[0].shape[-1] and not any(args[2:3])


def _always(_: tuple[Any, ...]) -> bool:
    return True


_SUSPICIONS: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    "index_select": lambda args: bool(args[2].dim() > 1),
    "nll_loss2d_forward": _differ_in_pixels,
    "multinomial": _draws_too_many,
    "take": _always,
    **dict.fromkeys(_INDEX_PUT, _always),
    **dict.fromkeys(_OF_ONE_DTYPE, _differ_in_dtype),
    **dict.fromkeys(_IN_PLACE, _cannot_hold),
    **dict.fromkeys(_COMPARISONS, _are_complex),
}


# The values of whole numbers are known beside the fakes, and so is the length of the table, if not what is in it.
def check_bounds(fakes: Fakes, func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would raise for these indices; found by calling the op itself on a table of zeros."""
    name = func._schema.name.partition("::")[2]
    if name in _INDEXED or name in _BY_TENSORS or name in _LOSSES or name in _BY_MASK:
        with unset_fake_temporarily():
            if (
                _does_not_fit(name, args)
                or _has_too_few(fakes.value, name, args)
                or any(_is_beyond(index, low, high) for index, low, high in _limits(fakes.value, name, args))
            ):
                _ask_with_values(fakes.value, func, args)


def _does_not_fit(name: str, args: tuple[Any, ...]) -> bool:
    """Whether what is to be added along an index has other sizes beside it."""
    if name not in {"index_add", "index_add_"} or args[0].dim() != args[3].dim():
        return False
    beside = [tuple(size for at, size in enumerate(one.shape) if at != args[1] % one.dim()) for one in (args[0], args[3])]
    return beside[0] != beside[1]


def _has_too_few(value: Callable[[Any], Any], name: str, args: tuple[Any, ...]) -> bool:
    """Whether a mask names more places than there are values for them."""
    if name not in _BY_MASK or (mask := value(args[1])) is None:
        return False
    return int(torch.broadcast_to(mask, args[0].shape).sum()) > int(args[2].numel())


def _limits(value: Callable[[Any], Any], name: str, args: tuple[Any, ...]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """(known index, smallest allowed, first that is not) for each."""
    if name in _INDEXED:
        table, dimension, index = _INDEXED[name]
        sizes = args[table].shape
        length = sizes[args[dimension] if dimension is not None else 0] if sizes else 1
        if (known := value(args[index])) is not None:
            yield known, 0, length
    elif name in _BY_MASK:
        return
    elif name in _LOSSES:
        classes, ignored = args[0].shape[1 if args[0].dim() > 1 else 0], args[4]
        if (known := value(args[1])) is not None:
            yield known[known != ignored], 0, classes
    else:
        for length, index in zip(args[0].shape, args[1], strict=False):
            if isinstance(index, torch.Tensor) and index.dtype in {torch.int64, torch.int32} and (known := value(index)) is not None:
                yield known, -length, length


def _is_beyond(index: torch.Tensor, low: int, high: int) -> bool:
    if not index.numel() or not isinstance(high, int):
        return False
    smallest, largest = torch.aminmax(index)
    return bool(smallest < low) or bool(largest >= high)


def _ask(func: Any, args: Any, real: Callable[[torch.Tensor], torch.Tensor], said: str = "") -> None:
    """Call the op itself, with real tensors for its own; what it refuses, where it says this, is raised as a `ValueFailure`."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            func(*rebuilt(args, real))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        if re.search(said, str(error)):
            raise ValueFailure(error) from None


def _ask_with_values(value: Callable[[Any], Any], func: Any, args: tuple[Any, ...], said: str = "") -> None:
    """On zeros, and on those numbers that are known."""

    def real(one: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor | None = value(one)
        if known is not None:
            return known.clone() if func._schema.is_mutable else known  # it may come through, and is not to write into what is known
        zeros = torch.zeros((), dtype=one.dtype).expand(one.shape)
        return zeros.contiguous() if func._schema.is_mutable and one.numel() <= _MANY else zeros

    _ask(func, args, real, said)


def check_kernels(fakes: Fakes, func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would say of these dtypes; found by calling the op itself on zeros, once for the same dtypes."""
    tensors = [argument for argument in args if isinstance(argument, FakeTensor)]
    dtypes = tuple(tensor.dtype for tensor in tensors)
    if _USUAL.issuperset(dtypes) or (func, dtypes) in fakes.asked or _only_moves(func):
        return
    fakes.asked.add((func, dtypes))
    if any(tensor.fake_device.type != "cpu" for tensor in tensors) or sum(tensor.numel() for tensor in tensors) > _SMALL:
        return
    if all(fakes.value(tensor) is not None for tensor in tensors):  # then it is computed anyway
        return
    _ask_with_values(lambda _: None, func, args, _SAID)


def _only_moves(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    is_view = not func._schema.is_mutable and any(one.alias_info is not None for one in func._schema.returns)
    return is_view or name in _MOVES or torch.Tag.nondeterministic_seeded in func.tags


def _differ(places: tuple[int, ...], args: tuple[Any, ...]) -> bool:
    return len({args[at].dtype for at in places if at < len(args) and isinstance(args[at], torch.Tensor)}) > 1


def _is_no_index(at: int, args: tuple[Any, ...]) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype not in {torch.int64, torch.int32} for index in args[at : at + 1])


_SUSPECTED_DTYPES: dict[str, Callable[[tuple[Any, ...]], bool]] = {
    **{name: partial(_differ, places) for name, places in _FACTORS.items()},
    **{name: partial(_is_no_index, at) for name, at in _INDEX_ARGUMENTS.items()},
    **dict.fromkeys(_LOSSES, lambda args: args[1].dtype not in {torch.int64, torch.uint8} or _differ((0, 2), args)),
    "_softmax": lambda args: not -max(args[0].dim(), 1) <= args[1] < max(args[0].dim(), 1),  # a fake one does not ask either
}


def check_dtypes(func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would raise for real operands of these dtypes and dimensions; asked of the op itself, on a few elements each."""
    name = func._schema.name.partition("::")[2]
    suspected = _SUSPECTED_DTYPES.get(name)
    if suspected is not None and suspected(args):
        spatial = name == "convolution"
        of_one_group = (*args[:8], 1) if spatial else args
        # Two by two, as torch has shorter ways for a single element; a kernel of one fits any stride and padding.
        sizes = [2, 2, 1, 1, 1] if spatial else [2] * max(one.dim() for one in args if isinstance(one, torch.Tensor))
        _ask(func, of_one_group, lambda one: torch.zeros(sizes[: one.dim()], dtype=one.dtype))
