"""Which inputs of an op are to blame for a bad output: asked of the op itself, by running it again with other inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from torchdebug_magics.instruments.nanhunt.knowledge import is_movement, is_pointwise
from torchdebug_magics.probing.tensors import bad_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.masks import Masks
    from torchdebug_magics.instruments.nanhunt.trace import Op

__all__ = ["healed", "overlap", "relevant", "still_bad", "tamed"]

_STAND_INS = (0.5, 1.5)
"""Finite values put in place of bad inputs; two, as one alone may lie at a pole of some op."""


def relevant(masks: Masks, op: Op, wanted: torch.Tensor | None, kind: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Inputs with elements of `kind` that can have led to the wanted ones."""
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
        if bad is not None and wanted is not None and (is_pointwise(op.func) or is_movement(op.func)) and not masks.is_full(wanted):
            reached = _reach(op, tensor, wanted)
            bad = reached if where.everywhere else bad & reached
            if not bool(bad.any()):
                continue
        found.append((tensor, bad))
    return found


def _reach(op: Op, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of an input that the wanted outputs depend on."""
    everything = torch.ones((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)
    if is_pointwise(op.func):
        return _shrink(mask, tensor.shape)
    numbers = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).reshape(tensor.shape)

    def numbered(leaf: Any) -> Any:
        if leaf is tensor:
            return numbers
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device)
        return leaf

    keywords = {name: value for name, value in op.kwargs.items() if name != "dtype"}
    try:
        moved = op.func(*tree_map(numbered, op.args), **tree_map(numbered, keywords))
    except Exception:  # noqa: BLE001 - an op that cannot move float64 numbers is treated as one that mixes all of them
        return everything
    outputs = moved if isinstance(moved, (tuple, list)) else (moved,)
    reached = torch.zeros(tensor.numel() + 1, dtype=torch.bool, device=tensor.device)
    known = [one for one in outputs if isinstance(one, torch.Tensor) and one.shape == mask.shape and one.dtype is torch.float64]
    for output in known:
        reached[output[mask].long()] = True
    return reached[1:].reshape(tensor.shape) if known else everything


def _shrink(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of broadcasting: which elements of a smaller shape were spread over `mask`."""
    while mask.dim() > len(shape):
        mask = mask.any(0)
    for dim, size in enumerate(shape):
        if size == 1 and mask.shape[dim] != 1:
            mask = mask.any(dim, keepdim=True)
    return mask.expand(shape) if mask.shape != shape else mask


def healed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every bad element replaced by a finite value."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(bad, value)


def tamed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every finite element replaced by a harmless value, the bad ones left."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(~bad, value)


def still_bad(
    op: Op, output: torch.Tensor, mask: torch.Tensor | None, changed: Callable[[torch.Tensor, float], torch.Tensor]
) -> torch.Tensor | None:
    """The wanted elements that are bad also with `changed` inputs; None where the op cannot be asked."""
    if mask is None:
        return None
    place = next((place for place, one in enumerate(op.outputs) if one is output), None)
    if place is None:
        return None
    still = mask
    for value in _STAND_INS:
        again = _rerun(op, changed, value, place)
        if again is None or again.shape != still.shape:
            return None
        bad = bad_mask(again)
        if bad is None:
            return None
        still = still & bad
    return still


def _rerun(op: Op, changed: Callable[[torch.Tensor, float], torch.Tensor], value: float, place: int) -> torch.Tensor | None:
    cleaned: dict[int, torch.Tensor] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in cleaned:
            copy = changed(leaf.detach(), value)
            cleaned[id(leaf)] = copy.clone() if copy.data_ptr() == leaf.data_ptr() else copy
        return cleaned[id(leaf)]

    state = torch.get_rng_state()
    try:
        result = op.func(*tree_map(replaced, op.args), **tree_map(replaced, op.kwargs))
    except Exception:  # noqa: BLE001 - an op that refuses healed inputs cannot be asked; the walk goes on along its bad inputs
        return None
    finally:
        torch.set_rng_state(state)
    outputs = [leaf for leaf in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(leaf, torch.Tensor)]
    if place < len(outputs):
        return outputs[place]
    written = [cleaned[id(tensor)] for tensor in op.inputs() if id(tensor) in cleaned]
    return next((copy for copy in written if copy.shape == op.outputs[place].shape), None)


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
