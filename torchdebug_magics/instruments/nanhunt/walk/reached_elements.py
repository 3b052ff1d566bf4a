"""Which elements of an input the wanted elements of an output depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.nanhunt.walk.op_rerun import run_again
from torchdebug_magics.probing.ops import is_movement, is_pointwise
from torchdebug_magics.probing.tensors import bad_mask

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op

__all__ = ["healed", "reached"]

_HARMLESS = 0.5
_CHOOSE = frozenset({"as_strided", "as_strided_copy", "constant_pad_nd"})
"""Of as many elements as go in, as many may come out, and yet be others."""
_MOST_QUESTIONS = 16


def healed(tensor: torch.Tensor, value: float = _HARMLESS) -> torch.Tensor:
    """Every bad element replaced by a finite value."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(bad, value)


def reached(op: Op, tensor: torch.Tensor, bad: torch.Tensor, place: int | None, wanted: torch.Tensor) -> torch.Tensor:
    """Those of the bad elements of an input that the wanted elements of the output at `place` depend on."""
    if is_pointwise(op.func):
        return bad & _shrink(wanted, tensor.shape)
    if place is None:
        return bad
    if is_movement(op.func):
        return bad if _moves_all(op, tensor, wanted) else bad & _moved(op, tensor, place, wanted)
    bad = bad & _apart(op, tensor, bad, place, wanted)
    return _enough(op, tensor, bad, place, wanted) if _may_leave_out(op) else bad


def _may_leave_out(op: Op) -> bool:
    """Whether what it uses of an input may depend on another one: on the labels of a loss, the places of a look-up, a mask."""
    return "::" in op.name or any(one.dim() and not (one.is_floating_point() or one.is_complex()) for one in op.inputs())


def _shrink(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of broadcasting: which elements of a smaller shape were spread over `mask`."""
    while mask.dim() > len(shape):
        mask = mask.any(0)
    for dim, size in enumerate(shape):
        if size == 1 and mask.shape[dim] != 1:
            mask = mask.any(dim, keepdim=True)
    return mask.expand(shape) if mask.shape != shape else mask


def _everything(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)


def _moves_all(op: Op, tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether it only gives its one input another shape or order, and all of that is wanted: the usual case, and then nothing is asked."""
    is_alone = all(one is tensor for one in op.inputs()) and op.name not in _CHOOSE
    return is_alone and wanted.numel() == tensor.numel() and bool(wanted.all())


def _moved(op: Op, tensor: torch.Tensor, place: int, wanted: torch.Tensor) -> torch.Tensor:
    """Of an op that only moves numbers: number the elements, move the numbers, and read them where they are wanted."""
    numbers = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device).reshape(tensor.shape)

    def numbered(leaf: torch.Tensor) -> torch.Tensor:
        if leaf is tensor:
            return numbers
        floats = leaf.is_floating_point() or leaf.is_complex()
        return torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device) if floats else leaf

    outputs = run_again(op, numbered, without=("dtype",))
    moved = outputs[place] if outputs is not None and place < len(outputs) else None
    if moved is None or moved.shape != wanted.shape or moved.dtype is not torch.float64:
        return _everything(tensor)
    found = torch.zeros(tensor.numel() + 1, dtype=torch.bool, device=tensor.device)
    here = moved[wanted]
    found[here[torch.isfinite(here)].long()] = True  # what is not finite was written down: padding
    return found[1:].reshape(tensor.shape)


def _apart(op: Op, tensor: torch.Tensor, bad: torch.Tensor, place: int, wanted: torch.Tensor) -> torch.Tensor:
    """Of an op that keeps the rows of a batch apart, in whichever dimension: the rows that are wanted."""
    kept = _everything(tensor)
    for dim, size in enumerate(tensor.shape):
        rows = _along(bad, dim)
        twins = {other: _along(wanted, other) for other, length in enumerate(wanted.shape) if length == size > 1}
        if any(bool((rows & ~twin).any()) for twin in twins.values()):  # else it would change nothing
            twin = _twin(op, tensor, dim, place, list(twins))
            if twin is not None:
                shape = [size if one == dim else 1 for one in range(tensor.dim())]
                kept = kept & twins[twin].reshape(shape)
    return kept


def _twin(op: Op, tensor: torch.Tensor, dim: int, place: int, candidates: list[int]) -> int | None:
    """The dimension of the output in which a NaN in one row of the input's dimension shows in that row alone; tried at both ends."""
    for row in (0, tensor.shape[dim] - 1):
        plain = healed(tensor).clone()
        plain.select(dim, row).fill_(torch.nan)
        shown = _shown(op, tensor, plain, place)
        if shown is None:
            return None
        candidates = [one for one in candidates if one < shown.dim() and _along(shown, one).nonzero().flatten().tolist() == [row]]
    return candidates[0] if len(candidates) == 1 else None


def _along(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Whether anything is marked at each index of one dimension."""
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(1)


def _enough(op: Op, tensor: torch.Tensor, bad: torch.Tensor, place: int, wanted: torch.Tensor) -> torch.Tensor:
    """The bad rows of which each alone makes a wanted element bad: a loss leaves out rows that it is told to ignore."""
    if not tensor.dim():
        return bad
    rows = _along(bad, 0).nonzero().flatten().tolist()
    if len(rows) < 2:  # noqa: PLR2004 - one row needs no choice
        return bad
    left, found = [_MOST_QUESTIONS], list[int]()

    def ask(some: list[int]) -> None:
        left[0] -= 1
        if left[0] >= 0 and not _is_bad_with(op, tensor, _only(bad, some), place, wanted):
            return
        if len(some) == 1 or left[0] < 0:
            found.extend(some)
            return
        ask(some[: len(some) // 2])
        ask(some[len(some) // 2 :])

    ask(rows)
    return _only(bad, found) if found else bad


def _only(mask: torch.Tensor, rows: list[int]) -> torch.Tensor:
    kept = torch.zeros(mask.shape[0], dtype=torch.bool, device=mask.device)
    kept[rows] = True
    return mask & kept.reshape(-1, *[1] * (mask.dim() - 1))


def _is_bad_with(op: Op, tensor: torch.Tensor, kept: torch.Tensor, place: int, wanted: torch.Tensor) -> bool:
    """Whether a wanted element is bad when these elements are the only bad ones; also where the op cannot be asked."""
    plain = torch.where(kept, tensor.detach(), healed(tensor.detach()))
    shown = _shown(op, tensor, plain, place)
    return shown is None or shown.shape != wanted.shape or bool((shown & wanted).any())


def _shown(op: Op, tensor: torch.Tensor, instead: torch.Tensor, place: int) -> torch.Tensor | None:
    """Where the output is bad with another tensor in an input's place and all other inputs healed."""
    outputs = run_again(op, lambda leaf: instead if leaf is tensor else healed(leaf))
    return bad_mask(outputs[place]) if outputs is not None and place < len(outputs) else None
