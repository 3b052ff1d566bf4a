"""What fake ops let through and real ones do not: products of different dtypes, a dimension that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchdebug_magics.probing.dry_runs.faking import ValueFailure

__all__ = ["check_dtypes"]

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
_INDEXED = {"embedding": (1,), "embedding_bag": (1,), "gather": (2,), "index_select": (2,)}

_LABELS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_ALONG_A_DIMENSION = frozenset({"_softmax"})
"""Ops whose fakes do not ask whether the dimension is there."""


def check_dtypes(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Raise what torch would raise for real operands of these dtypes and dimensions; asked of the op itself, on a few elements each."""
    name = func._schema.name.partition("::")[2]
    if (
        _differ(name, args)
        or _points_nowhere(name, args)
        or _indexes_with_other_numbers(name, args)
        or _labels_are_other_numbers(name, args)
    ):
        _ask(func, name, args)


def _differ(name: str, args: tuple[Any, ...]) -> bool:
    factors = [args[at] for at in _FACTORS.get(name, ()) if at < len(args) and isinstance(args[at], torch.Tensor)]
    return len({one.dtype for one in factors}) > 1


def _points_nowhere(name: str, args: tuple[Any, ...]) -> bool:
    if name not in _ALONG_A_DIMENSION:
        return False
    dims = max(args[0].dim(), 1)
    return not -dims <= args[1] < dims


def _indexes_with_other_numbers(name: str, args: tuple[Any, ...]) -> bool:
    return not all(_is_index(args[at]) for at in _INDEXED.get(name, ()) if at < len(args))


def _labels_are_other_numbers(name: str, args: tuple[Any, ...]) -> bool:
    return name in _LABELS and args[1].dtype not in {torch.int64, torch.uint8}


def _is_index(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dtype in {torch.int64, torch.int32}


def _ask(func: Any, name: str, args: tuple[Any, ...]) -> None:
    spatial = name == "convolution"
    with unset_fake_temporarily(), torch.no_grad():
        small = [_small(value, spatial=spatial) if isinstance(value, torch.Tensor) else value for value in args]
        if spatial:
            small[8] = 1  # groups
        try:
            func(*small)
        except Exception as error:  # noqa: BLE001 - whatever torch says
            raise ValueFailure(error) from None


def _small(tensor: torch.Tensor, *, spatial: bool) -> torch.Tensor:
    # Two by two, as torch has shorter ways for a single element; a kernel of one fits any stride and padding.
    return torch.zeros([2, 2, 1, 1, 1][: tensor.dim()] if spatial else [2] * tensor.dim(), dtype=tensor.dtype)
