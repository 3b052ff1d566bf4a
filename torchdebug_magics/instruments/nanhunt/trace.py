"""Every op of a replayed step, with the lineage of whatever is non-finite.

Only tensors that hold a NaN or an infinity, and what made them, are kept alive; of all other ops a few words remain.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves, tree_map

from torchdebug_magics.instruments.nanhunt.knowledge import HIDDEN_WRITES, argument_of, is_uninitialised, op_name
from torchdebug_magics.probing.dispatch import OpListener, Run
from torchdebug_magics.probing.tensors import is_bad
from torchdebug_magics.probing.where import user_frame

if TYPE_CHECKING:
    from torchdebug_magics.probing.modules import Call, ModuleCalls

__all__ = ["Op", "Source", "Trace", "written_by"]

_MOST_REMEMBERED_BYTES = 2 << 30
_NO_SEQUENCE = 1 << 62
"""AccumulateGrad nodes have a sequence number above this; they belong to no forward op."""


@dataclass(eq=False)
class Op:
    """One dispatched op."""

    index: int
    name: str
    func: Any
    call: Call | None
    line: tuple[str, int, str] | None
    """File, line and function of the user's frame; inside a backward that of a user's own backward code, else None."""
    sequence: int | None
    """Of the autograd node this op made."""
    node_sequence: int | None
    """Of the autograd node that runs this op, in a backward."""
    node_name: str | None
    backward: bool
    late: bool = False
    """Whether it ran after the backward()."""
    parents: tuple[int, ...] = ()
    """Indices of the ops that made its inputs."""
    is_bad: bool = False
    """Whether an output is non-finite."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What it was called with, before it ran; only where its output is non-finite."""
    outputs: tuple[torch.Tensor, ...] = ()
    written: tuple[torch.Tensor, ...] = ()

    def inputs(self) -> list[torch.Tensor]:
        """Its tensor arguments, as they were before it ran."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: an op, or None for what was there before the step."""

    op: Op | None
    tensor: torch.Tensor


@dataclass
class _Known:
    reference: weakref.ref[torch.Tensor]
    is_bad: bool
    op: Op | None
    stamp: int


class Trace:
    """Records while attached; afterwards answers where a tensor came from."""

    def __init__(self, calls: ModuleCalls) -> None:
        self.ops: list[Op] = []
        self.backward_frame: FrameType | None = None
        """Our frame below which a running backward stands; frames above it are the user's own backward code."""
        self.late = False
        self.paused = False
        """Whether ops only run: a backward that nothing is asked about."""
        self._calls = calls
        self._known: dict[int, _Known] = {}
        self._by_place: dict[tuple[Any, ...], Op] = {}
        self._writers: dict[int, list[Op]] = {}
        self._by_sequence: dict[int, Op] = {}
        self._kept: list[torch.Tensor] = []
        self._room_bytes = _MOST_REMEMBERED_BYTES
        self._users: dict[int, list[tuple[Op, torch.Tensor]]] = {}
        self._copied: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        """What a copy, made before it was overwritten, is the copy of; for tensors from before the step."""

    def attach(self, stack: ExitStack) -> None:
        """Record until the stack closes."""
        self._calls.attach(stack)
        stack.enter_context(OpListener(self._record))

    def forward_of(self, op: Op) -> Op | None:
        """The forward op that a backward op is the derivative of; through the first backward for a double one."""
        seen: set[int] = set()
        current: Op | None = op
        while current is not None and current.backward and current.index not in seen:
            seen.add(current.index)
            current = self._maker_of_node(current)
        return current if current is not op else None

    def _maker_of_node(self, op: Op) -> Op | None:
        if op.node_sequence is None:
            return None
        if not (op.node_name or "").endswith("CopySlices"):
            return self._by_sequence.get(op.node_sequence)
        # An in-place op on a view: autograd wraps the op's own node, made just before, into this one.
        earlier = (self._by_sequence.get(op.node_sequence - back) for back in range(1, 4))
        return next((one for one in earlier if one is not None and one.name.endswith("_")), None)

    def source(self, tensor: torch.Tensor) -> Source:
        """What made a tensor, by identity or, for an alias that autograd made of it, by place in memory."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor and known.op is not None:
            return Source(known.op, tensor)
        if id(tensor) in self._originals:
            return Source(None, self._originals[id(tensor)])
        place = _place(tensor)
        op = self._by_place.get(place) if place else None
        return Source(op, tensor)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a copy was made of before it was overwritten; any other tensor itself."""
        return self._copied.get(id(tensor), tensor)

    def writers(self, tensor: torch.Tensor) -> list[Op]:
        """Ops that wrote non-finite values in place into its memory, the latest first."""
        return self._writers.get(_memory(tensor), [])[::-1]

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        if self.paused:
            return run()
        node = torch._C._current_autograd_node()
        sequence = _get_sequence_nr() - 1
        in_backward = node is not None or self.backward_frame is not None
        frame = user_frame(sys._getframe(3), below=self.backward_frame)
        # Checkpointing runs forward code inside a backward: with gradients on, in the user's own frames.
        recomputes = in_backward and frame is not None and torch.is_grad_enabled() and self._calls.current is not None
        op = Op(
            index=len(self.ops),
            name=op_name(func),
            func=func,
            call=self._calls.current,
            line=(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name) if frame is not None else None,
            sequence=sequence,
            node_sequence=_sequence(node),
            node_name=node.name() if node is not None else None,
            backward=in_backward and not recomputes,
            late=self.late,
        )
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        bad_inputs = [self._is_bad(tensor) for tensor in inputs]
        op.parents = tuple(source.index for source in (self.source(tensor).op for tensor in inputs) if source is not None)
        written = written_by(func, args, kwargs)
        before = {id(tensor): tensor.detach().clone() for tensor in written if _copyable(tensor)}
        prior = {id(tensor): self.source(tensor).op for tensor in written}
        self._save_for_users(written, before)
        result = run()
        self._by_sequence.setdefault(sequence, op)
        self.ops.append(op)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs += [tensor for tensor in written if not any(tensor is one for one in outputs)]
        self._learn(op, outputs, any(bad_inputs))
        if op.is_bad:
            self._keep(op, args, kwargs, before, written, prior)
        elif not op.backward:
            self._remember(op, args, kwargs, inputs)
        return result

    def _learn(self, op: Op, outputs: list[torch.Tensor], bad_input: bool) -> None:
        """What the outputs hold. A view of clean inputs is clean without a look."""
        views = not bad_input and getattr(op.func, "is_view", False)
        ignored = views or is_uninitialised(op.name)
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

    def _keep(
        self, op: Op, args: Any, kwargs: Any, before: dict[int, torch.Tensor], written: list[torch.Tensor], prior: dict[int, Op | None]
    ) -> None:
        def as_before(leaf: Any) -> Any:
            return before.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        op.args, op.kwargs = tree_map(as_before, args), tree_map(as_before, kwargs)
        op.written = tuple(written)
        self._kept += [*op.outputs, *op.inputs()]
        for tensor in op.inputs():
            self._users.setdefault(_memory(tensor) or id(tensor), []).append((op, tensor))
        for tensor in written:
            memory = _memory(tensor)
            if memory:
                self._writers.setdefault(memory, []).append(op)
            copy = before.get(id(tensor))
            if copy is not None:
                # The copy stands for what the tensor was: it has the tensor's earlier maker, not this op.
                self._known[id(copy)] = _Known(weakref.ref(copy), is_bad(copy), prior[id(tensor)], op.index)
                self._kept.append(copy)
                self._copied[id(copy)] = tensor
                if prior[id(tensor)] is None:
                    self._originals[id(copy)] = tensor

    def _remember(self, op: Op, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        """What a clean forward op was given, in case its derivative is the birth; as long as there is room."""
        self._room_bytes -= sum(tensor.numel() * tensor.element_size() for tensor in inputs if tensor.layout is torch.strided)
        if self._room_bytes > 0:
            op.args, op.kwargs = args, kwargs

    def _save_for_users(self, written: list[torch.Tensor], before: dict[int, torch.Tensor]) -> None:
        """Earlier ops were called with what this memory held then: give them the copy that is made before it is overwritten."""
        for one in written:
            for user, tensor in self._users.pop(_memory(one) or id(one), ()):
                if id(tensor) not in before and _copyable(tensor):
                    before[id(tensor)] = tensor.detach().clone()
                copy = before.get(id(tensor))
                if copy is None:
                    continue
                if self._copied.get(id(copy)) is not tensor:
                    self._copied[id(copy)] = tensor
                    self._known[id(copy)] = _Known(weakref.ref(copy), is_bad(copy), self.source(tensor).op, len(self.ops))
                    self._kept.append(copy)

                def older(leaf: Any, tensor: torch.Tensor = tensor, copy: torch.Tensor = copy) -> Any:
                    return copy if leaf is tensor else leaf

                user.args, user.kwargs = tree_map(older, user.args), tree_map(older, user.kwargs)

    def _is_bad(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor:
            writers = self._writers.get(_memory(tensor))
            if not writers or writers[-1].index <= known.stamp:
                return known.is_bad
            known.is_bad, known.stamp = is_bad(tensor), len(self.ops)
            return known.is_bad
        op = self._by_place.get(_place(tensor) or ())
        bad = is_bad(tensor)
        self._known[id(tensor)] = _Known(weakref.ref(tensor), bad, op, len(self.ops))
        if bad:
            self._kept.append(tensor)
        return bad


def _sequence(node: Any) -> int | None:
    if node is None:
        return None
    number: int = node._sequence_nr()
    return number if number < _NO_SEQUENCE else None


def _copyable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and not tensor._is_zerotensor()
        and not tensor.is_quantized
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op writes in place, also those its schema does not admit."""
    found: list[torch.Tensor] = []
    hidden_names = HIDDEN_WRITES.get(op_name(func), ()) if argument_of(func, args, kwargs, "training") is not False else ()
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        hidden = argument.name in hidden_names
        if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


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
