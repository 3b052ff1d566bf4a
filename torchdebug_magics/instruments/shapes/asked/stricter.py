"""What real ops ask of sizes and dtypes, and fake ones do not: suspicious operands are put to the op itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchdebug_magics.instruments.shapes.asked.bounds import ask
from torchdebug_magics.probing.dry_runs.faking import ValueFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.probing.dry_runs.faking import Fakes

__all__ = ["check_strictly"]

_IN_PLACE = ("mul_", "add_", "sub_", "div_")
_COMPARISONS = ("gt", "lt", "ge", "le")
_OF_ONE_DTYPE = ("index_add", "index_add_", "native_layer_norm", "grid_sampler_2d", "grid_sampler_3d", "_cdist_forward")
_INDEX_PUT = ("index_put", "index_put_")
_SMALL = 1 << 20
"""Elements up to which it is cheap to ask."""


def check_strictly(fakes: Fakes, func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would raise for real operands of these sizes and dtypes."""
    name = func._schema.name.partition("::")[2]
    if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and _overlaps(args[0]):
        _write(func, args)
    suspected = _SUSPICIONS.get(name)
    if suspected is not None and suspected(args) and all(one.numel() <= _SMALL for one in args if isinstance(one, torch.Tensor)):
        with unset_fake_temporarily():
            if name not in _INDEX_PUT or _are_whole(fakes, args[1]):
                ask(fakes.value, func, args)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several of its elements are one, as `expand` leaves them."""
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) and tensor.numel() <= _SMALL


def _write(func: Any, args: tuple[Any, ...]) -> None:
    with unset_fake_temporarily(), torch.no_grad():
        one, *others = args
        target = torch.zeros((), dtype=one.dtype).expand(one.shape)
        try:
            func(target, *(torch.zeros(other.shape, dtype=other.dtype) if isinstance(other, torch.Tensor) else other for other in others))
        except Exception as error:  # noqa: BLE001 - whatever torch says
            if "single memory location" in str(error):
                raise ValueFailure(error) from None


def _are_whole(fakes: Fakes, indices: Any) -> bool:
    """Whether it is known how many places they name: a mask of unknown values may name any number."""
    given = [one for one in indices if isinstance(one, torch.Tensor)]
    return all(one.dtype in {torch.int64, torch.int32} or fakes.value(one) is not None for one in given)


def _differ_in_dtype(args: tuple[Any, ...]) -> bool:
    """A norm of half precision may have weights of full precision: the check then succeeds."""
    return len({one.dtype for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()}) > 1


def _cannot_hold(args: tuple[Any, ...]) -> bool:
    return len(args) > 1 and not torch.can_cast(torch.result_type(args[0], args[1]), args[0].dtype)


def _are_complex(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in args)


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
