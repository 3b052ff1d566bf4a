"""Indices beyond their table: fake ops let them through, real ones do not.

The values of whole numbers are known beside the fakes, and so is the length of the table, if not what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchdebug_magics.probing.dry_runs.faking import ValueFailure

if TYPE_CHECKING:
    from torchdebug_magics.probing.dry_runs.faking import Fakes

__all__ = ["ask", "check_bounds"]

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
                ask(fakes.value, func, args)


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


def ask(value: Callable[[Any], Any], func: Any, args: tuple[Any, ...]) -> None:
    """Call the op itself on zeros, and on those numbers that are known; what it refuses is raised as a `ValueFailure`."""

    def real(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return [real(item) for item in one] if isinstance(one, (list, tuple)) else one
        known = value(one)
        if known is not None:
            return known.clone() if func._schema.is_mutable else known  # it may come through, and is not to write into what is known
        zeros = torch.zeros((), dtype=one.dtype).expand(one.shape)
        return zeros.contiguous() if func._schema.is_mutable and one.numel() <= _MANY else zeros

    try:
        with torch.no_grad():
            func(*(real(one) for one in args))
    except Exception as error:  # noqa: BLE001 - whatever torch says
        raise ValueFailure(error) from None
