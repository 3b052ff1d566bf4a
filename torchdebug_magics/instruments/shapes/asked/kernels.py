"""Dtypes for which torch has no kernel, such as ``1 - mask``: fake ops compute nothing, and do not ask for one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torchdebug_magics.instruments.shapes.asked.bounds import ask
from torchdebug_magics.probing.dry_runs.faking import ValueFailure

if TYPE_CHECKING:
    from torchdebug_magics.probing.dry_runs.faking import Fakes

__all__ = ["check_kernels"]

_USUAL = frozenset([torch.float32, torch.float64])
_SAID = re.compile(r"not implemented for|(is|are) not supported|only supports|not support")
_SMALL = 1 << 20
"""Elements up to which it is cheap to ask."""
_MOVES = frozenset(
    [
        *("cat", "stack", "clone", "copy", "_to_copy", "repeat", "index", "index_select", "gather", "where", "masked_fill", "fill"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_zeros", "eq", "ne", "_local_scalar_dense", "arange"),
    ]
)
"""Ops that take any dtype, and may make much of little."""


def check_kernels(fakes: Fakes, func: Any, args: tuple[Any, ...]) -> None:
    """Raise what torch would say of these dtypes; found by calling the op itself on zeros, once for the same dtypes."""
    tensors = [one for one in args if isinstance(one, FakeTensor)]
    dtypes = tuple(one.dtype for one in tensors)
    if _USUAL.issuperset(dtypes) or (func, dtypes) in fakes.asked or _only_moves(func):
        return
    fakes.asked.add((func, dtypes))
    if any(one.fake_device.type != "cpu" for one in tensors) or sum(one.numel() for one in tensors) > _SMALL:
        return
    if all(fakes.value(one) is not None for one in tensors):  # then it is computed anyway
        return
    with unset_fake_temporarily():
        try:
            ask(lambda _: None, func, args)
        except ValueFailure as failure:
            if _SAID.search(str(failure.error)):
                raise


def _only_moves(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    is_view = not func._schema.is_mutable and any(one.alias_info is not None for one in func._schema.returns)
    return is_view or name in _MOVES or torch.Tag.nondeterministic_seeded in func.tags
