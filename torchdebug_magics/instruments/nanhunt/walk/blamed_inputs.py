"""Which inputs of an op are to blame for a bad output: asked of the op itself, by running it again with other inputs."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.walk.op_rerun import run_again
from torchdebug_magics.instruments.nanhunt.walk.reached_elements import healed, reached
from torchdebug_magics.probing.ops import is_pointwise
from torchdebug_magics.probing.tensors import bad_mask, is_bad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
    from torchdebug_magics.instruments.nanhunt.walk.bad_elements import Masks

__all__ = ["healed", "negated", "overlap", "relevant", "still_bad", "tamed"]

_STAND_INS = (0.5, 1.5)
"""Finite values put in place of bad inputs; two, as one alone may lie at a pole of some op."""


def relevant(
    masks: Masks, op: Op, place: int | None, wanted: torch.Tensor | None, kind: int
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Inputs with elements of `kind` that can have led to the wanted ones of the output at `place`."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    seen: set[int] = set()
    for tensor in op.inputs():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        where = masks.of(tensor, kind)
        if not where.some:
            continue
        bad = where.mask
        if bad is not None and wanted is not None and not (is_pointwise(op.func) and masks.is_full(wanted)):
            bad = reached(op, tensor, bad, place, wanted)
            if not bool(bad.any()):
                continue
        found.append((tensor, bad))
    return found


def negated(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every plus infinity as a minus infinity."""
    del value
    return tensor.masked_fill(tensor == math.inf, -math.inf) if tensor.is_floating_point() else tensor


def tamed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every finite element replaced by a harmless value, the bad ones left."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(~bad, value)


def still_bad(op: Op, place: int | None, mask: torch.Tensor | None, changed: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    """The wanted elements that are bad also with inputs `changed` by a `value`; None where the op cannot be asked."""
    if mask is None or place is None or any(bad_mask(one) is None and is_bad(one) for one in op.inputs()):
        return None
    still = mask
    for value in _STAND_INS:
        outputs = run_again(op, partial(changed, value=value))
        bad = bad_mask(outputs[place]) if outputs is not None and place < len(outputs) else None
        if bad is None or bad.shape != still.shape:
            return None
        still = still & bad
    return still


def overlap(tensor: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The wanted elements of `tensor` that share memory with `target`, and the same as elements of `target`."""
    if tensor.dtype is not target.dtype:
        return None, None
    if tensor is target:
        return mask, mask
    here, there = _offsets(tensor), _offsets(target)
    hit = torch.isin(here, there) & mask
    return hit, torch.isin(there, here[hit])


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Each element's place in its storage."""
    offsets = torch.full((), int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=False)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        offsets = offsets + (torch.arange(size, device=tensor.device) * stride).reshape(shape)
    return offsets.expand(tensor.shape)
