"""An op, run again with stand-ins for its tensors: what the op does is asked of the op itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdebug_magics.probing.ops import written_by
from torchdebug_magics.probing.rng import RandomState

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op

__all__ = ["place_of", "run_again"]


def run_again(op: Op, stand_in: Callable[[torch.Tensor], torch.Tensor], *, without: tuple[str, ...] = ()) -> list[torch.Tensor] | None:
    """Its outputs in the order of ``op.outputs``; None where it cannot be asked. Stand-ins may be written, random numbers come back."""
    known: dict[int, torch.Tensor] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            made = stand_in(leaf)
            known[id(leaf)] = made.detach().clone() if made is leaf else made  # the op may write it
        return known[id(leaf)]

    draws = torch.Tag.nondeterministic_seeded in op.func.tags or "::" in op.name  # of another library's op nobody knows
    state = RandomState.take() if draws else None
    try:
        args = tree_map(replaced, op.args)
        kwargs = {name: tree_map(replaced, value) for name, value in op.kwargs.items() if name not in without}
        outputs = [leaf for leaf in tree_leaves(op.func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        written = written_by(op.func, args, kwargs)
    except Exception:  # noqa: BLE001 - an op that refuses its stand-ins cannot be asked
        return None
    finally:
        if state is not None:
            state.put_back()
    return outputs + [tensor for tensor in written if not any(tensor is one for one in outputs)]


def place_of(op: Op, output: torch.Tensor) -> int | None:
    """Which of the op's outputs a tensor is; also the alias of one, that autograd made."""
    same = [place for place, one in enumerate(op.outputs) if one is output]
    return next(iter(same or [place for place, one in enumerate(op.outputs) if _is_alias(one, output)]), None)


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_nested or other.is_nested:
        return False
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype and one.data_ptr() == other.data_ptr()
