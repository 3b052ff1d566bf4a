"""From a bad sink back to the birth: along bad elements only, past every infinity to the arithmetic that made it.

An infinity that is meant, as a causal mask or a start value has, is told from a fault.

What caused a bad output is asked of the op itself: run it again without the bad inputs. If the output is still bad, it was born here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.causes.tensor_names import owner_of
from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op, Trace
from torchdebug_magics.instruments.nanhunt.walk.blamed_inputs import (
    Masks,
    healed,
    negated,
    overlap,
    place_of,
    relevant,
    still_bad,
    tamed,
)
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.ops import is_movement, is_pointwise
from torchdebug_magics.probing.tensors import INF, NAN, dense

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
    place: int | None
    """Which of the op's outputs it is, where that is known."""
    mask: torch.Tensor | None
    kind: int
    via: tuple[Op, ...]


def walk(trace: Trace, sinks: list[torch.Tensor]) -> list[Birth]:
    """The births that reach any of `sinks`, the earliest first. Births on purpose are left out unless there is no other."""
    with modes_aside(), torch.no_grad(), torch.amp.autocast("cpu", enabled=False), torch.amp.autocast("cuda", enabled=False):
        births = [*_Walk(trace, Masks()).run([(sink, None, ()) for sink in sinks])]
    births.sort(key=lambda birth: (birth.on_purpose, birth.index))
    meant = [birth for birth in births if not birth.on_purpose]
    return meant or births


class _Walk:
    def __init__(self, trace: Trace, masks: Masks) -> None:
        self._trace = trace
        self._masks = masks
        self._visits = 0

    def run(self, starts: list[tuple[torch.Tensor, torch.Tensor | None, tuple[Op, ...]]], kinds: int = NAN | INF) -> Iterator[Birth]:
        """Births of the bad elements of `starts`. Ops are taken latest first, so that all that leads to one is known when it comes."""
        waiting: dict[int, dict[int, _Wanted]] = {}
        heap: list[int] = []

        def want(tensor: torch.Tensor, mask: torch.Tensor | None, via: tuple[Op, ...], before: int) -> Iterator[Birth]:
            kind, elements = self._masks.choose(tensor, mask, kinds)
            if not kind:
                return
            for op, output, part in self._makers(tensor, elements, kind, before):
                if op is None:
                    yield Birth(None, tensor, part, kind, is_mask(tensor, kind, via), via)
                    continue
                if op.index not in waiting:
                    waiting[op.index] = {}
                    heapq.heappush(heap, -op.index)
                held = waiting[op.index].get(id(output))
                if held is None:
                    waiting[op.index][id(output)] = _Wanted(output, place_of(op, self._trace.original(output)), part, kind, via)
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
        """One op: it is a birth, or some of its inputs lead on, or both."""
        via = (op, *wanted.via)
        nans = relevant(self._masks, op, wanted.place, wanted.mask, NAN) if wanted.kind & NAN else []
        makers = (self._trace.maker(tensor) for tensor, _ in nans)
        if any(maker is not None and maker.name == "scalar_tensor" for maker in makers):
            yield self._birth(op, wanted)  # a NaN that was written into some rows: they are the op's, the constant has none
            return
        infs = relevant(self._masks, op, wanted.place, wanted.mask, INF) if not nans else []
        inputs = nans or infs
        if not inputs:
            yield self._birth(op, wanted)
            return
        # An input that is nothing but NaN: whatever the op does with it, it need not be asked.
        is_full = any(self._masks.of(tensor, NAN).everywhere and tensor.dim() for tensor, _ in nans)
        explained = is_movement(op.func) or (is_pointwise(op.func) and nans) or is_full
        still = None if explained else still_bad(op, wanted.place, wanted.mask, healed)
        if still is not None and bool(still.any()):
            yield self._birth(op, replace(wanted, mask=still))
            # Bad without them: they may still be a second cause, if they alone are enough.
            alone = still_bad(op, wanted.place, wanted.mask, tamed)
            if alone is not None and not bool(alone.any()):
                return
        if wanted.kind & NAN and not nans:
            # An infinity became NaN here. One that was put there on purpose explains the op, any other is the earlier birth.
            causes = list(self.run([(tensor, mask, via) for tensor, mask in infs], kinds=INF))
            meant = [birth for birth in causes if not birth.on_purpose]
            negative = None if meant else still_bad(op, wanted.place, wanted.mask, negated)
            if negative is not None and not bool(negative.any()):  # softmax of +inf is NaN, of -inf it is not
                meant = [replace(birth, on_purpose=False) for birth in causes if birth.op is not None][:1]
            yield from meant or [self._birth(op, wanted)]
            return
        for tensor, mask in inputs:
            yield from want(tensor, mask, via, op.index)

    def _birth(self, op: Op, wanted: _Wanted) -> Birth:
        return Birth(op, wanted.tensor, wanted.mask, wanted.kind, on_purpose(op, wanted.kind), wanted.via)

    def _makers(
        self, tensor: torch.Tensor, mask: torch.Tensor | None, kind: int, before: int
    ) -> Iterator[tuple[Op | None, torch.Tensor, torch.Tensor | None]]:
        """What made the wanted elements: the last in-place writes into that memory, then the op that returned the tensor."""
        made = self._trace.maker(tensor)
        if made is not None and made.index >= before:
            made = None
        left, chosen = mask, self._masks.of(tensor, kind).mask
        for writer in self._trace.writers(tensor):
            if writer.index >= before or (made is not None and writer.index <= made.index) or left is None:
                continue
            for target in writer.written:
                hit, on_target = overlap(tensor, left, target)
                if hit is not None and chosen is not None and bool((hit & chosen).any()):
                    yield writer, target, on_target
                    left = left & ~hit
        if left is None or chosen is None or bool((left & chosen).any()):
            yield made, self._trace.original(tensor) if made is None else tensor, left


def _join(held: _Wanted, mask: torch.Tensor | None, kind: int) -> None:
    if kind == held.kind:
        held.mask = None if mask is None or held.mask is None else held.mask | mask
    elif kind == NAN:
        held.mask, held.kind = mask, kind


_ON_PURPOSE = frozenset([
    "fill", "full", "full_like", "new_full", "masked_fill", "index_fill", "scalar_tensor", "where", "constant_pad_nd", "pad",
    "lift_fresh", "lift_fresh_copy", "_to_copy", "add", "sub", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "scatter",
    "index_put", "_index_put_impl", "masked_scatter", "copy",
])  # fmt: skip
"""Ops by which an infinity that the user wrote down enters: a mask, a start value, padding."""
_WRITES_DOWN = frozenset({"masked_fill", "where"})
"""A NaN written here marks what is missing; one from `fill_` or `full` is as likely a fault."""


def on_purpose(op: Op, kind: int) -> bool:
    """Whether the op put an infinity that somebody wrote down."""
    name = op.name.removesuffix("_")
    if name not in _ON_PURPOSE or op.backward:
        return False
    scalars = [value for value in (*op.args, *op.kwargs.values()) if isinstance(value, float)]
    if any(math.isinf(value) if kind == INF else math.isnan(value) and name in _WRITES_DOWN for value in scalars):
        return True
    # `torch.tensor(-inf)` holds one as well.
    return kind == INF and name in {"lift_fresh", "lift_fresh_copy"}


_ADDITIVE = frozenset([
    "add", "sub", "where", "masked_fill", "_softmax", "_log_softmax", "logsumexp", "logaddexp", "amax", "max", "maximum",
])  # fmt: skip


def is_mask(tensor: torch.Tensor, kind: int, via: tuple[Op, ...]) -> bool:
    """Whether a tensor from before the step is a mask: minus infinity and at most two other values, used as masks are."""
    numbers = dense(tensor)
    if kind != INF or numbers is None or numbers.is_complex() or bool((numbers == math.inf).any()) or bool(torch.isnan(numbers).any()):
        return False
    finite = numbers[torch.isfinite(numbers)]
    if finite.numel() and torch.unique(finite).numel() > 2:  # noqa: PLR2004 - kept and blocked
        used = next((op for op in via if not is_movement(op.func)), None)
        return (
            used is not None
            and (used.name.removesuffix("_") in _ADDITIVE or "attention" in used.name)
            and finite.numel() * 4 < numbers.numel() * 3
        )
    return True


def is_bad_weight(tensor: torch.Tensor, roots: Iterable[torch.nn.Module]) -> bool:
    """Whether infinities that a model holds were put there by nobody: in a matrix, or plus infinity in a vector that is trained.

    A buffer may hold infinities by design, and so may a vector that is added, such as a bias that blocks a class.
    """
    owner = owner_of(tensor, roots)
    if owner is None or owner[0] != "parameter":
        return False
    return tensor.dim() > 1 or (tensor.requires_grad and bool((tensor == math.inf).any()))
