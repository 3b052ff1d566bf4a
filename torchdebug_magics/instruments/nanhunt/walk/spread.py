"""All bad elements of a birth that reached the sink: the walk follows NaNs first, and an infinity beside them is no less bad."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.walk.op_rerun import place_of
from torchdebug_magics.instruments.nanhunt.walk.reached_elements import reached
from torchdebug_magics.probing.tensors import bad_mask

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op, Trace
    from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth

__all__ = ["with_all_kinds"]


def with_all_kinds(birth: Birth, trace: Trace) -> Birth:
    """The birth with every bad element marked, NaN or infinity, that came to the sink the same way."""
    bad = bad_mask(birth.tensor)
    if birth.mask is None or bad is None or bad.shape != birth.mask.shape or not bool((bad & ~birth.mask).any()):
        return birth
    way = _way_back(birth, trace)
    return birth if way is None else replace(birth, mask=birth.mask | (bad & way))


def _way_back(birth: Birth, trace: Trace) -> torch.Tensor | None:
    """Elements of the birth that bad elements of the sink depend on; None where the way cannot be told."""
    if not birth.via:
        return torch.ones_like(birth.mask) if birth.mask is not None else None
    ends = [output for output in birth.via[-1].outputs if (mask := bad_mask(output)) is not None and bool(mask.any())]
    if len(ends) != 1:
        return None
    tensor, wanted = ends[0], bad_mask(ends[0])
    makers: list[Op | None] = [birth.op, *birth.via[:-1]]
    for op, maker in zip(reversed(birth.via), reversed(makers), strict=True):
        place = place_of(op, trace.original(tensor))
        given = _given(op, maker, birth.tensor, trace)
        bad = None if given is None else bad_mask(given)
        if given is None or bad is None or wanted is None or place is None:
            return None
        tensor, wanted = given, reached(op, given, bad, place, wanted)
    return wanted if wanted is not None and wanted.shape == birth.tensor.shape else None


def _given(op: Op, maker: Op | None, leaf: torch.Tensor, trace: Trace) -> torch.Tensor | None:
    """The one input of an op that came from another, or that was there before."""
    found = {id(one): one for one in op.inputs() if (trace.source(one).op is maker if maker is not None else one is leaf)}
    return next(iter(found.values())) if len(found) == 1 else None
