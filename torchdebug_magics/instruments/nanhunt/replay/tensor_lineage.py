"""Where tensors come from, and which are non-finite: known by identity or, for aliases that autograd makes, by place in memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.probing.ops import is_uninitialised
from torchdebug_magics.probing.tensors import is_bad

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.replay.traced_op import Op

__all__ = ["Lineage", "Overwritten", "Source", "memory_of"]


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: an op, or None for what was there before the step."""

    op: Op | None
    tensor: torch.Tensor


@dataclass(frozen=True)
class Overwritten:
    """A tensor that an op is about to write into."""

    tensor: torch.Tensor
    copy: torch.Tensor | None
    """What it held; None where it cannot be copied."""
    maker: Op | None
    """What had made that."""


@dataclass
class _Known:
    reference: weakref.ref[torch.Tensor]
    is_bad: bool
    op: Op | None
    stamp: int


class Lineage:
    """Only tensors that hold a NaN or an infinity, and what they were made of, are kept alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._by_place: dict[tuple[Any, ...], Op] = {}
        self._writers: dict[int, list[Op]] = {}
        self._kept: list[torch.Tensor] = []
        self._copied: dict[int, torch.Tensor] = {}
        """What a copy was made of."""
        self._originals: dict[int, torch.Tensor] = {}
        """What a copy, made before it was overwritten, is the copy of; for tensors from before the step."""

    def source(self, tensor: torch.Tensor) -> Source:
        """What made a tensor."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor and known.op is not None:
            return Source(known.op, tensor)
        if id(tensor) in self._originals:
            return Source(None, self._originals[id(tensor)])
        place = _place(tensor)
        return Source(self._by_place.get(place) if place else None, tensor)

    def writers(self, tensor: torch.Tensor) -> list[Op]:
        """Ops that wrote non-finite values in place into its memory, the latest first."""
        return self._writers.get(_memory(tensor), [])[::-1]

    def is_bad(self, tensor: torch.Tensor, now: int) -> bool:
        """Whether a tensor that is read at the time `now` holds anything non-finite; looked at only if it may have changed."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor:
            writers = self._writers.get(_memory(tensor))
            if not writers or writers[-1].index <= known.stamp:
                return known.is_bad
            known.is_bad, known.stamp = is_bad(tensor), now
            return known.is_bad
        op = self._by_place.get(_place(tensor) or ())
        bad = is_bad(tensor)
        self._known[id(tensor)] = _Known(weakref.ref(tensor), bad, op, now)
        if bad:
            self._kept.append(tensor)
        return bad

    def made(self, op: Op, outputs: list[torch.Tensor], *, of_bad: bool) -> None:
        """The op has run. A view of clean inputs is clean without a look."""
        ignored = (not of_bad and getattr(op.func, "is_view", False)) or is_uninitialised(op.name)
        for tensor in outputs:
            bad = not ignored and is_bad(tensor)
            op.is_bad |= bad
            self._known[id(tensor)] = _Known(weakref.ref(tensor), bad, op, op.index)
            place = _place(tensor)
            if place and bad:
                self._by_place[place] = op
            elif place:
                self._by_place.pop(place, None)
        op.outputs = tuple(outputs) if op.is_bad else ()

    def keep(self, op: Op, written: list[Overwritten]) -> None:
        """A bad op: it may be asked later, with all that it was given."""
        op.written = tuple(one.tensor for one in written)
        self._kept += [*op.outputs, *op.inputs()]
        for one in written:
            memory = _memory(one.tensor)
            if memory:
                self._writers.setdefault(memory, []).append(op)
            self.stand_in(one, op.index)

    def stand_in(self, one: Overwritten, now: int) -> None:
        """The copy stands for what the tensor was: it has the tensor's earlier maker, not the op that overwrites it."""
        if one.copy is None or self._copied.get(id(one.copy)) is one.tensor:
            return
        self._copied[id(one.copy)] = one.tensor
        self._known[id(one.copy)] = _Known(weakref.ref(one.copy), is_bad(one.copy), one.maker, now)
        self._kept.append(one.copy)
        if one.maker is None:
            self._originals[id(one.copy)] = one.tensor

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a copy was made of before it was overwritten; any other tensor itself."""
        return self._copied.get(id(tensor), tensor)

    def overwritten(self, tensor: torch.Tensor) -> Overwritten:
        """To be asked before the op runs."""
        return Overwritten(tensor, tensor.detach().clone() if _copyable(tensor) else None, self.source(tensor).op)


def _copyable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_quantized
    )


def memory_of(tensor: torch.Tensor) -> int:
    """The address of its storage, or a number of its own where it has none."""
    return _memory(tensor) or -id(tensor)


def _memory(tensor: torch.Tensor) -> int:
    """The address of its storage, or 0 where it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor._is_zerotensor():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    memory = _memory(tensor)
    return (memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) if memory else None
