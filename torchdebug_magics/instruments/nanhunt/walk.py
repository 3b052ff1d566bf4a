"""From a bad sink back to the birth: along bad elements only, past every infinity to the arithmetic that made it.

What caused a bad output is asked of the op itself: run it again without the bad inputs. If the output is still bad, it was born here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.nanhunt.knowledge import ON_PURPOSE, is_movement, is_pointwise
from torchdebug_magics.instruments.nanhunt.trace import Op, Trace
from torchdebug_magics.probing.tensors import INF, NAN, bad_mask, dense

__all__ = ["Birth", "walk"]

_STAND_INS = (0.5, 1.5)
"""Finite values put in place of bad inputs; two, as one alone may lie at a pole of some op."""
_MOST_OPS = 20_000


@dataclass(frozen=True, eq=False)
class Birth:
    """Where something non-finite begins: in an op, or in a tensor that was there before the step."""

    op: Op | None
    tensor: torch.Tensor
    """The op's output, or the tensor that was bad from the start."""
    mask: torch.Tensor | None
    """The elements of it that matter."""
    kind: int
    on_purpose: bool = False
    via: tuple[Op, ...] = ()
    """Ops from the birth to the sink."""

    @property
    def index(self) -> int:
        """Its place in time."""
        return -1 if self.op is None else self.op.index


@dataclass
class _Wanted:
    """Elements of one output whose cause is looked for."""

    tensor: torch.Tensor
    mask: torch.Tensor | None
    kind: int
    via: tuple[Op, ...]


def walk(trace: Trace, sinks: list[torch.Tensor]) -> list[Birth]:
    """The births that reach any of `sinks`, the earliest first. Births on purpose are left out unless there is no other."""
    with _disable_current_modes(), torch.no_grad(), _without_autocast():
        births = list(_Walk(trace).run([(sink, None, ()) for sink in sinks]))
    births.sort(key=lambda birth: (birth.on_purpose, birth.index))
    meant = [birth for birth in births if not birth.on_purpose]
    return meant or births


class _Walk:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._visits = 0

    def run(self, starts: list[tuple[torch.Tensor, torch.Tensor | None, tuple[Op, ...]]], kinds: int = NAN | INF) -> Iterator[Birth]:
        """Births of the bad elements of `starts`. Ops are taken latest first, so that all that leads to one is known when it comes."""
        waiting: dict[int, dict[int, _Wanted]] = {}
        heap: list[int] = []

        def want(tensor: torch.Tensor, mask: torch.Tensor | None, via: tuple[Op, ...], before: int) -> Iterator[Birth]:
            kind, elements = _choose(tensor, mask, kinds)
            if not kind:
                return
            for op, output, part in self._makers(tensor, elements, before):
                if op is None:
                    yield Birth(None, tensor, part, kind, _mask_like(tensor, kind, via), via)
                    continue
                if op.index not in waiting:
                    waiting[op.index] = {}
                    heapq.heappush(heap, -op.index)
                held = waiting[op.index].get(id(output))
                if held is None:
                    waiting[op.index][id(output)] = _Wanted(output, part, kind, via)
                else:
                    _join(held, part, kind)

        for tensor, mask, via in starts:
            yield from want(tensor, mask, via, len(self._trace.ops) + 1)
        while heap and self._visits < _MOST_OPS:
            self._visits += 1
            op = self._trace.ops[-heapq.heappop(heap)]
            for wanted in waiting.pop(op.index).values():
                yield from self._through(op, wanted, want)

    def _through(self, op: Op, wanted: _Wanted, want: Any) -> Iterator[Birth]:
        """One op: is it a birth, and which of its inputs lead on?"""
        via = (op, *wanted.via)
        nans = _relevant(op, wanted, NAN) if wanted.kind & NAN else []
        infs = _relevant(op, wanted, INF) if not nans else []
        inputs = nans or infs
        if not inputs:
            yield self._birth(op, wanted)
            return
        still = None if is_movement(op.func) or (is_pointwise(op.func) and nans) else _still_bad(op, wanted, _HEALED)
        if still is not None and bool(still.any()):
            yield self._birth(op, _Wanted(wanted.tensor, still, wanted.kind, wanted.via))
            # Bad without them: they may still be a second cause, if they alone are enough.
            alone = _still_bad(op, wanted, _TAMED)
            if alone is not None and not bool(alone.any()):
                return
        if wanted.kind & NAN and not nans:
            # An infinity became NaN here. One that was put there on purpose explains the op, any other is the earlier birth.
            causes = list(self._nested(infs, via, op.index))
            meant = [birth for birth in causes if not birth.on_purpose]
            yield from meant or [self._birth(op, wanted)]
            return
        for tensor, mask in inputs:
            yield from want(tensor, mask, via, op.index)

    def _nested(self, infs: list[tuple[torch.Tensor, torch.Tensor | None]], via: tuple[Op, ...], before: int) -> Iterator[Birth]:
        inner = _Walk(self._trace)
        inner._visits = self._visits
        del before
        yield from inner.run([(tensor, mask, via) for tensor, mask in infs], kinds=INF)
        self._visits = inner._visits

    def _birth(self, op: Op, wanted: _Wanted) -> Birth:
        return Birth(op, wanted.tensor, wanted.mask, wanted.kind, _on_purpose(op, wanted.kind), wanted.via)

    def _makers(self, tensor: torch.Tensor, mask: torch.Tensor | None, before: int) -> Iterator[tuple[Op | None, torch.Tensor, torch.Tensor | None]]:
        """What made the wanted elements: the last in-place writes into that memory, then the op that returned the tensor."""
        source = self._trace.source(tensor)
        made = source.op
        if made is not None and made.index >= before:
            made = None
        left = mask
        for writer in self._trace.writers(tensor):
            if writer.index >= before or (made is not None and writer.index <= made.index) or left is None:
                continue
            for target in writer.written:
                hit, on_target = _overlap(tensor, left, target)
                if hit is not None and bool(hit.any()):
                    yield writer, target, on_target
                    left = left & ~hit
        if left is None or bool(left.any()):
            yield made, source.tensor if made is None else _output_of(made, tensor), left


def _output_of(op: Op | None, tensor: torch.Tensor) -> torch.Tensor:
    if op is None:
        return tensor
    return next((output for output in op.outputs if output is tensor), tensor)


def _choose(tensor: torch.Tensor, mask: torch.Tensor | None, kinds: int) -> tuple[int, torch.Tensor | None]:
    """The kind to follow, NaN before infinity, and the elements that are of it."""
    for kind in (NAN, INF):
        if kinds & kind:
            bad = bad_mask(tensor, kind)
            if bad is None:
                numbers = dense(tensor)
                if numbers is not None and bool((torch.isnan if kind == NAN else torch.isinf)(numbers).any()):
                    return kind, None
                continue
            bad = bad if mask is None or mask.shape != bad.shape else bad & mask
            if bool(bad.any()):
                return kind, bad
    return 0, None


def _join(held: _Wanted, mask: torch.Tensor | None, kind: int) -> None:
    if kind == held.kind:
        held.mask = None if mask is None or held.mask is None else held.mask | mask
    elif kind == NAN:
        held.mask, held.kind = mask, kind


def _relevant(op: Op, wanted: _Wanted, kind: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Inputs with elements of `kind` that can have led to the wanted ones."""
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    seen: set[int] = set()
    for tensor in op.inputs():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        chosen, bad = _choose(tensor, None, kind)
        if not chosen:
            continue
        if bad is not None and wanted.mask is not None:
            bad = bad & _reach(op, tensor, wanted.mask) if is_pointwise(op.func) or is_movement(op.func) else bad
            if not bool(bad.any()):
                continue
        found.append((tensor, bad))
    return found


def _reach(op: Op, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of an input that the wanted outputs depend on."""
    everything = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
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


def _healed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every bad element replaced by a finite value."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(bad, value)


def _tamed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Every finite element replaced by a harmless value, the bad ones left."""
    bad = bad_mask(tensor)
    return tensor if bad is None else tensor.masked_fill(~bad, value)


_HEALED, _TAMED = _healed, _tamed


def _still_bad(op: Op, wanted: _Wanted, changed: Callable[[torch.Tensor, float], torch.Tensor]) -> torch.Tensor | None:
    """The wanted elements that are bad also with `changed` inputs; None where the op cannot be asked."""
    if wanted.mask is None:
        return None
    place = next((place for place, output in enumerate(op.outputs) if output is wanted.tensor), None)
    if place is None:
        return None
    still = wanted.mask
    for value in _STAND_INS:
        output = _rerun(op, changed, value, place)
        if output is None or output.shape != still.shape:
            return None
        bad = bad_mask(output)
        if bad is None:
            return None
        still = still & bad
    return still


def _rerun(op: Op, changed: Callable[[torch.Tensor, float], torch.Tensor], value: float, place: int) -> torch.Tensor | None:
    cleaned: dict[int, torch.Tensor] = {}

    def healed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in cleaned:
            copy = changed(leaf.detach(), value)
            cleaned[id(leaf)] = copy.clone() if copy.data_ptr() == leaf.data_ptr() else copy
        return cleaned[id(leaf)]

    state = torch.get_rng_state()
    try:
        result = op.func(*tree_map(healed, op.args), **tree_map(healed, op.kwargs))
    except Exception:  # noqa: BLE001 - an op that refuses healed inputs cannot be asked; the walk goes on along its bad inputs
        return None
    finally:
        torch.set_rng_state(state)
    outputs = [leaf for leaf in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(leaf, torch.Tensor)]
    if place < len(outputs):
        return outputs[place]
    written = [cleaned[id(tensor)] for tensor in op.inputs() if id(tensor) in cleaned]
    return next((copy for copy in written if copy.shape == op.outputs[place].shape), None)


def _overlap(tensor: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
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
    offsets = torch.full((), tensor.storage_offset(), dtype=torch.int64, device=tensor.device)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        shape = [1] * tensor.dim()
        shape[dim] = size
        offsets = offsets + (torch.arange(size, device=tensor.device) * stride).reshape(shape)
    return offsets.expand(tensor.shape)


def _on_purpose(op: Op, kind: int) -> bool:
    """Whether the op put an infinity that somebody wrote down."""
    if kind != INF or op.name not in ON_PURPOSE or op.backward:
        return False
    scalars = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if any(math.isinf(value) for value in scalars):
        return True
    # A clean copy, a cast or a constant: `torch.tensor(-inf)` and `float("-inf")` held in a tensor.
    return op.name in {"lift_fresh", "lift_fresh_copy"}


_ADDITIVE = frozenset("add add_ sub sub_ where masked_fill masked_fill_ _softmax _log_softmax logsumexp logaddexp amax max maximum".split())


def _mask_like(tensor: torch.Tensor, kind: int, via: tuple[Op, ...]) -> bool:
    """Whether a tensor from before the step is a mask: minus infinity and at most two other values, used as masks are."""
    numbers = dense(tensor)
    if kind != INF or numbers is None or numbers.is_complex() or bool((numbers == math.inf).any()) or bool(torch.isnan(numbers).any()):
        return False
    finite = numbers[torch.isfinite(numbers)]
    if finite.numel() and torch.unique(finite).numel() > 2:  # noqa: PLR2004 - kept and blocked
        used = next((op for op in via if not is_movement(op.func)), None)
        return used is not None and (used.name in _ADDITIVE or "attention" in used.name) and finite.numel() * 4 < numbers.numel() * 3
    return True


def _without_autocast() -> Any:
    return torch.amp.autocast("cpu", enabled=False)
