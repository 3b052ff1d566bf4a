"""A birth with everything that is known around it: what a diagnosis is drawn from, and what a finding is written from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Any

import torch

from torchdebug_magics.instruments.nanhunt.replay.op_trace import Op, Trace
from torchdebug_magics.instruments.nanhunt.report import Kind, Sink
from torchdebug_magics.instruments.nanhunt.rerun.attempt import Position
from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry
from torchdebug_magics.instruments.nanhunt.walk.birth_walk import Birth
from torchdebug_magics.instruments.nanhunt.watch.sentinel import Beginning
from torchdebug_magics.probing.ops import is_movement, is_pointwise
from torchdebug_magics.probing.tensors import NAN, bad_mask, dense, describe, sizes_of

_MOST_CONSUMERS = 16


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the probe knows of the step and the run."""

    step: int
    backward: int
    roots: tuple[torch.nn.Module, ...] = ()
    entries: tuple[Entry, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    beginning: Beginning = field(default_factory=Beginning)
    chain: tuple[Position, ...] = ()
    """Where the user's program stands."""
    sink: Sink = field(default_factory=Sink)
    sink_kind: Kind = "nan"


@dataclass(frozen=True)
class Evidence:
    """One birth, looked at from all sides."""

    birth: Birth
    trace: Trace
    context: Context
    births: tuple[Birth, ...] = ()
    """All that reach the sink, this one among them."""

    @property
    def op(self) -> Op | None:
        """The op of the birth itself; a backward op in a backward."""
        return self.birth.op

    @property
    def known(self) -> Op | None:
        """The op that a user knows: the birth's own, or of a backward of torch's the one that it is the derivative of."""
        op = self.birth.op
        return op if op is None or not op.backward or op.line is not None else self.trace.forward_of(op) or op

    @property
    def in_gradient(self) -> bool:
        """Whether only gradients are bad: what the forward made bad it also threw away."""
        return self.context.sink.kind == "gradient"

    @property
    def name(self) -> str:
        """The op that a user knows."""
        return "" if self.known is None else self.known.name

    @property
    def plain_name(self) -> str:
        """The same, whether it writes in place or not."""
        return self.name.removesuffix("_")

    @property
    def derivative(self) -> tuple[Op, ...]:
        """The backward ops, from the birth on, of the one autograd node that the finding is about; none for a finding in the forward."""
        birth = self.birth.op
        if birth is None or not (birth.backward or self.in_gradient):
            return ()
        chain = list(dropwhile(lambda op: not op.backward, (birth, *self.birth.via)))
        if not birth.backward and (not chain or self.trace.forward_of(chain[0]) is not birth):
            return ()  # another op's derivative used a value that was bad in the forward already
        return tuple(takewhile(lambda op: op.backward and op.node_sequence == chain[0].node_sequence, chain))

    @property
    def kind(self) -> int:
        """NaN or infinity; of a derivative, what came of it: an infinity inside its formula that is multiplied by 0 there is a NaN."""
        mask = self._mask()
        for op in takewhile(lambda op: is_pointwise(op.func) or is_movement(op.func), self.derivative):
            for output in op.outputs:
                bad = bad_mask(output, NAN)
                if bad is not None and mask is not None and bad.shape == mask.shape and bool((bad & mask).any()):
                    return NAN
        return self.birth.kind

    def was_thrown_away(self) -> bool:
        """Whether the gradient that came back to a birth in a backward is 0 there: the forward did not use the value."""
        ops = self.derivative
        if not ops or ops[0] is not self.birth.op:
            return True  # born in the forward, healed before the loss
        makers = [(op, tensor, self.trace.maker(tensor)) for op in ops for tensor in op.inputs()]
        came = [
            self._value(op, tensor)
            for op, tensor, maker in makers
            if maker is not None and maker.backward and maker.node_sequence != ops[0].node_sequence
        ]
        return any(isinstance(value, (int, float)) and value == 0 for value in came or self.values_of(ops[0]))

    @property
    def index(self) -> tuple[int, ...]:
        """The first bad element."""
        return first_bad(self._mask())

    @property
    def rows(self) -> tuple[int, ...]:
        """Bad indices along dimension 0."""
        return bad_rows(self._mask())

    @property
    def columns(self) -> tuple[int, ...]:
        """Of a table, columns that are bad in every row while others are good in every row."""
        mask = self._mask()
        if mask is None or mask.dim() != 2 or len(mask) < 2:  # noqa: PLR2004 - a table of several rows
            return ()
        bad = mask.all(0)
        return tuple(bad.nonzero().flatten().tolist()) if bool(bad.any()) and torch.equal(bad, mask.any(0)) and not bool(bad.all()) else ()

    def _mask(self) -> torch.Tensor | None:
        """Bad elements of the tensor at the birth, of the kind of the birth."""
        return self.birth.mask if self.birth.mask is not None else bad_mask(self.birth.tensor)

    def operands(self) -> tuple[Any, ...]:
        """Values of the known op's inputs at the index; for what cannot be indexed so, a few words."""
        return () if self.known is None else self.values_of(self.known)

    def values_of(self, op: Op) -> tuple[Any, ...]:
        """The same of any op whose elements are those of the birth."""
        return tuple(self._value(op, tensor) for tensor in [tensor for tensor in op.inputs() if tensor.dtype is not torch.bool][:6])

    def _value(self, op: Op, tensor: torch.Tensor) -> Any:
        aligned = is_pointwise(op.func) or tuple(tensor.shape) == sizes_of(self.birth.tensor)
        return value_at(tensor, self.index if aligned else (), self.birth.tensor)

    def inputs_at(self, place: int) -> torch.Tensor | None:
        """An input of the known op, as it was."""
        inputs = [] if self.known is None else self.known.inputs()
        return inputs[place] if place < len(inputs) else None

    def consumers(self, op: Op) -> Iterator[Op]:
        """Forward ops that use what `op` made, directly or a few ops later."""
        reached = {op.index}
        for one in self.trace.ops[op.index + 1 :]:
            if one.backward:
                break
            if reached.intersection(one.parents):
                yield one
                if len(reached) <= _MOST_CONSUMERS:
                    reached.add(one.index)


def bad_rows(mask: torch.Tensor | None) -> tuple[int, ...]:
    """Indices along dimension 0 in which any element is marked."""
    if mask is None or not mask.dim() or not bool(mask.any()):
        return ()
    return tuple(mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist())


def first_bad(mask: torch.Tensor | None) -> tuple[int, ...]:
    """The first element that is marked."""
    return () if mask is None or not mask.dim() or not bool(mask.any()) else tuple(mask.nonzero()[0].tolist())


def value_at(tensor: torch.Tensor, index: tuple[int, ...], like: torch.Tensor) -> Any:
    """The number of an operand, broadcast as the result is, at one of its elements; a few words where there is no such element."""
    numbers = dense(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor
    if numbers is None or tensor.layout is not torch.strided:
        return describe(tensor)
    if numbers.numel() == 1:
        return numbers.reshape(()).item()
    try:
        return numbers.expand(like.shape)[index].item() if index else describe(tensor)
    except (RuntimeError, IndexError):
        return describe(tensor)
