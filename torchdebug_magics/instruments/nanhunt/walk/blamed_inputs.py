"""Which inputs of an op are to blame for a bad output: asked of the op itself, by running it again with other inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.ops import is_movement, is_pointwise, written_by
from torchdebug_magics.probing.state.rng import RandomState
from torchdebug_magics.probing.tensors import INF, NAN, bad_mask, dense, is_bad

_STAND_INS = (0.5, 1.5)
"""Finite values put in place of bad inputs; two, as one alone may lie at a pole of some op."""
_HARMLESS = 0.5
_KEEPS = frozenset({"detach", "alias", "lift_fresh", "lift_fresh_copy"})
"""Each element stays in its place, and there is no derivative to ask."""


def relevant(
    masks: Masks, op: Op, place: int | None, wanted: torch.Tensor | None, kind: int
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Inputs with elements of `kind` that can have led to the wanted ones of the output at `place`; infinities beside a NaN count, too."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for tensor in {id(given): given for given in op.inputs()}.values():
        where = masks.of(tensor, kind)
        if not where.some:
            continue
        if where.mask is None or wanted is None or (is_pointwise(op.func) and bool(wanted.all())):
            found.append((tensor, masks.all_of(tensor, kind)))
            continue
        bad = reached(op, tensor, where.mask, place, wanted)
        if bool(bad.any()):
            beside = masks.of(tensor, INF).mask if kind == NAN and masks.of(tensor, INF).some else None
            found.append((tensor, bad if beside is None else bad | reached(op, tensor, beside, place, wanted)))
    return found


def negated(tensor: torch.Tensor, value: float) -> torch.Tensor:  # noqa: ARG001 - of the shape of `healed` and `tamed`
    """Every plus infinity as a minus infinity."""
    return tensor.masked_fill(tensor == math.inf, -math.inf) if tensor.is_floating_point() else tensor


def tamed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every finite element replaced by a harmless value, the bad ones left."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(~bad, value)


def still_bad(op: Op, place: int | None, mask: torch.Tensor | None, changed: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    """The wanted elements that are bad also with inputs `changed` by a `value`; None where the op cannot be asked."""
    if mask is None or place is None or any(bad_mask(tensor) is None and is_bad(tensor) for tensor in op.inputs()):
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


class Where(NamedTuple):
    """The elements of one kind in one tensor."""

    mask: torch.Tensor | None
    """None where the tensor's own indices are not those of its numbers (sparse, nested)."""
    some: bool
    everywhere: bool


class Masks:
    """A cache of `Where`s; it keeps the tensors it was asked about, so that no id is used twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Where]] = {}

    def of(self, tensor: torch.Tensor, kind: int) -> Where:
        """Where a tensor holds a value of one kind."""
        key = id(tensor), kind
        if key not in self._known:
            mask, numbers = bad_mask(tensor, kind), dense(tensor)
            test = torch.isnan if kind == NAN else torch.isinf
            count = 0 if numbers is None else int((test(numbers) if mask is None else mask).sum())
            self._known[key] = tensor, Where(mask, count > 0, mask is not None and 0 < count == mask.numel())
        return self._known[key][1]

    def choose(self, tensor: torch.Tensor, mask: torch.Tensor | None, kinds: int) -> tuple[int, torch.Tensor | None]:
        """The kind to follow, NaN before infinity, and the elements of `mask` that are bad."""
        for kind in (NAN, INF):
            where = self.of(tensor, kind) if kinds & kind else None
            if where is None or not where.some:
                continue
            if where.mask is None or mask is None or mask.shape != where.mask.shape:
                return kind, self.all_of(tensor, kind)
            if where.everywhere or bool((where.mask & mask).any()):
                return kind, mask
        return 0, None

    def all_of(self, tensor: torch.Tensor, kind: int) -> torch.Tensor | None:
        """The elements of a kind; of NaN, with the infinities beside it."""
        mask, beside = self.of(tensor, kind).mask, self.of(tensor, INF)
        return mask if mask is None or beside.mask is None or not beside.some else mask | beside.mask


def healed(tensor: torch.Tensor, value: float = _HARMLESS) -> torch.Tensor:
    """Every bad element replaced by a finite value."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(bad, value)


def reached(op: Op, tensor: torch.Tensor, bad: torch.Tensor, place: int | None, wanted: torch.Tensor) -> torch.Tensor:
    """Those of the bad elements of an input that the wanted elements of the output at `place` depend on; all, where the op cannot tell."""
    if is_pointwise(op.func) or op.name in _KEEPS:
        return bad & _shrink(wanted, tensor.shape)
    is_view = bool(getattr(op.func, "is_view", False)) and op.name != "as_strided"
    gives_all_on = is_view and sum(output.numel() for output in op.outputs) == tensor.numel()
    if place is None or (gives_all_on and bool(wanted.all())):  # the usual case: nothing is asked
        return bad
    if is_movement(op.func):
        used = _derived(op, tensor, bad, place, wanted, 0.0)
        return bad if used is None else bad & used
    for extremes in ((3.0, -3.0), (math.nan,)):
        parts = [used for extreme in extremes if (used := _derived(op, tensor, bad, place, wanted, extreme)) is not None]
        chosen = bad & torch.stack(parts).any(0) if parts else bad
        if bool(chosen.any()):
            return chosen
    return bad


def _shrink(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of broadcasting: which elements of a smaller shape were spread over `mask`."""
    while mask.dim() > len(shape):
        mask = mask.any(0)
    for dim, size in enumerate(shape):
        if size == 1 and mask.shape[dim] != 1:
            mask = mask.any(dim, keepdim=True)
    return mask.expand(shape) if mask.shape != shape else mask


def _derived(op: Op, tensor: torch.Tensor, bad: torch.Tensor, place: int, wanted: torch.Tensor, extreme: float) -> torch.Tensor | None:
    """Where the derivative of the wanted elements with respect to an input is not 0; None where the op has no derivative.

    By ordinary numbers in place of all others: what an op reads decides, not what it happened to be given. The bad elements are
    `extreme`, larger or smaller than these, so that an op which chooses the largest or the smallest chooses them, as it does NaN.
    """
    generator = torch.Generator().manual_seed(0)

    def ordinary(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point() and not leaf.is_complex():
            return leaf
        # An 8-bit type is promoted to no other.
        kind = torch.float32 if leaf.dtype.itemsize == 1 else torch.promote_types(leaf.dtype, torch.float32)
        made = torch.rand(leaf.shape, generator=generator, dtype=torch.float32).add_(0.5).to(leaf.device, kind)
        return torch.where(bad, made + extreme, made) if leaf is tensor else made

    with torch.enable_grad(), modes_aside(), _past_hooks_of_the_user():
        asked = ordinary(tensor).requires_grad_()
        outputs = run_again(op, lambda leaf: asked * 1 if leaf is tensor else ordinary(leaf))
        output = outputs[place] if outputs is not None and place < len(outputs) else None
        if output is None or output.shape != wanted.shape or output.grad_fn is None:
            return None
        weights = torch.rand(output.shape, generator=generator).add_(0.5).to(output.device, output.dtype) * wanted
        slope = _slopes(output, weights, [asked])
    if slope is None:
        return None
    return torch.zeros_like(bad) if slope[0] is None else slope[0].detach() != 0


def with_slope(op: Op) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first result of a pointwise op, and how much a relative change of its inputs changes it; None where it cannot be asked."""
    inputs = [leaf for leaf in op.inputs() if leaf.is_floating_point() and leaf.layout is torch.strided]
    asked = {id(leaf): leaf.detach().requires_grad_() for leaf in inputs}
    with torch.enable_grad(), modes_aside(), _past_hooks_of_the_user():
        outputs = run_again(op, lambda leaf: asked.get(id(leaf), leaf) * 1 if leaf.is_floating_point() else leaf) if op.args else None
        if not outputs or not outputs[0].is_floating_point():
            return None
        slopes = _slopes(outputs[0], torch.ones_like(outputs[0]), [*asked.values()]) if outputs[0].grad_fn is not None else None
    size = torch.zeros_like(outputs[0])
    for slope, leaf in zip(slopes or (), asked.values(), strict=False):
        if slope is not None and slope.shape == size.shape:
            size = size + (slope * leaf).detach().abs()
    return outputs[0].detach(), size


def _slopes(output: torch.Tensor, weights: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
    try:
        # Past `torch.autograd.grad`, which the probe watches.
        slopes: tuple[torch.Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
            (output,), (weights,), keep_graph=False, create_graph=False, inputs=tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    except (RuntimeError, NotImplementedError):
        return None
    return slopes


def _past_hooks_of_the_user() -> contextlib.AbstractContextManager[object]:
    """Past hooks on what autograd saves, where there are any: inside ``torch.func`` there cannot be."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - a builtin without keywords
    return (
        contextlib.nullcontext()
        if hooks is None
        else torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    )


def run_again(op: Op, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor] | None:
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
        args, kwargs = tree_map(replaced, (op.args, op.kwargs))
        outputs = [leaf for leaf in tree_leaves(op.func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        written = written_by(op.func, args, kwargs)
    except Exception:  # noqa: BLE001 - an op that refuses its stand-ins cannot be asked
        return None
    finally:
        if state is not None:
            state.put_back()
    return outputs + [tensor for tensor in written if not any(tensor is output for output in outputs)]


def place_of(op: Op, output: torch.Tensor) -> int | None:
    """Which of the op's outputs a tensor is; also the alias of one, that autograd made."""
    same = [place for place, one in enumerate(op.outputs) if one is output]
    return next(iter(same or [place for place, one in enumerate(op.outputs) if _is_alias(one, output)]), None)


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided or one.is_nested or other.is_nested:
        return False
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype is other.dtype and one.data_ptr() == other.data_ptr()
