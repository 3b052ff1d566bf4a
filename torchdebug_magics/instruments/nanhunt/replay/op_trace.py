"""Every op of a replayed step, joined to modules and lines, and backward ops to forward ops by autograd's sequence numbers.

What is non-finite is kept alive with all that its op was given; what clean forward ops were given is kept while there is room.
Per module call: what its output held, and the gradient that came back to it.
"""

from __future__ import annotations

import itertools
import math
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from torchdebug_magics.instruments.nanhunt.report import LayerRow
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.graphs import NodeMakers
from torchdebug_magics.probing.hooks import Hook
from torchdebug_magics.probing.modules import Call, ModuleCalls
from torchdebug_magics.probing.op_recorder import OpRecorder
from torchdebug_magics.probing.ops import is_uninitialised, op_name, written_by
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import user_frame
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import dense, is_bad, kind_of, sizes_of, tensors_in

_FP16_MAX = 65504.0
_MOST_REMEMBERED_BYTES = 2 << 30
_NO_SEQUENCE = 1 << 62
"""AccumulateGrad nodes have a sequence number above this; they belong to no forward op."""
Line = tuple[str, int, str]
"""File, line and function."""


@dataclass(eq=False)
class Op:
    """What was called, where, and what belongs to it."""

    index: int
    name: str
    func: Any
    call: Call | None
    line: Line | None
    """Of the user's frame; inside a backward that of a user's own backward code, else None."""
    place: tuple[CodeType, int] | None
    """The instruction of that line."""
    sequence: int | None
    """Of the autograd node this op made."""
    node_sequence: int | None
    """Of the autograd node that runs this op, in a backward."""
    backward: bool
    late: bool = False
    """Whether it ran after the backward()."""
    parents: tuple[int, ...] = ()
    """Indices of the ops that made its inputs."""
    is_bad: bool = False
    """Whether an output is non-finite."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What it was called with, before it ran; of an op with a finite output only while there was room."""
    outputs: tuple[torch.Tensor, ...] = ()
    written: tuple[torch.Tensor, ...] = ()

    def inputs(self) -> list[torch.Tensor]:
        """Its tensor arguments, as they were before it ran."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


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


def _number_of(tensor: torch.Tensor) -> int:
    """The address of its storage, or a number of its own where it has none."""
    return memory_of(tensor) or -id(tensor)


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    memory = memory_of(tensor)
    return (memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) if memory else None


def _row(call: Call, tensor: torch.Tensor) -> LayerRow | None:
    """What an output holds; None for a kind of tensor whose numbers cannot be read."""
    numbers = dense(tensor)
    if numbers is None:
        return None
    values = numbers.abs() if numbers.is_complex() else numbers
    is_bad = bool(kind_of(values))
    low, high, mean_abs = _extremes(values[torch.isfinite(values)] if is_bad else values)
    return LayerRow(
        module=call.path,
        type=call.type,
        call=call.number,
        shape=sizes_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        nan_count=int(torch.isnan(values).sum()) if is_bad else 0,
        posinf_count=int((values == math.inf).sum()) if is_bad else 0,
        neginf_count=int((values == -math.inf).sum()) if is_bad else 0,
        min=low,
        max=high,
        mean_abs=mean_abs,
        fp16_share=None if low is None or high is None else max(abs(low), abs(high)) / _FP16_MAX,
    )


def _extremes(finite: torch.Tensor) -> tuple[float | None, float | None, float | None]:
    """(min, max, mean magnitude); Nones for nothing."""
    if not finite.numel():
        return None, None, None
    low, high = torch.aminmax(finite)
    total = torch.linalg.vector_norm(finite, 1, dtype=torch.float64 if finite.dtype is torch.float64 else torch.float32)
    return float(low), float(high), float(total) / finite.numel()


class LayerWatch:
    """Collects a row for every module call while attached. Attach it before the `ModuleCalls` it asks, so that its calls still run.

    Apart from the trace, as hooks on tensors of the step hold it, and the trace holds such tensors.
    """

    def __init__(self, calls: ModuleCalls) -> None:
        self._calls = calls
        self._hooks = calls.hooks
        self._rows: list[LayerRow] = []

    def attach(self, stack: ExitStack) -> None:
        """Collect until the stack closes."""
        self._hooks.module_calls(stack, lambda *_: None, self._leave)

    def rows(self) -> tuple[LayerRow, ...]:
        """What was collected, in the order the calls ended."""
        return tuple(self._rows)

    def _leave(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        call = self._calls.current
        if call is None or call.module is not module:
            return
        for tensor in tensors_in(output):
            with modes_aside(), torch.no_grad():
                row = _row(call, tensor)
            if row is not None:
                self._rows.append(row)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(Hook(self._hooks, partial(self._gradient, call, len(self._rows) - 1)))
            return  # the first tensor stands for the call

    def _gradient(self, call: Call, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        with modes_aside(), torch.no_grad():
            came = _row(call, gradient)
        if came is not None:
            self._rows[place] = replace(
                self._rows[place],
                grad_nan_count=came.nan_count,
                grad_inf_count=came.posinf_count + came.neginf_count,
                grad_max_abs=None if came.min is None or came.max is None else max(abs(came.min), abs(came.max)),
                grad_mean_abs=came.mean_abs,
            )


class _Running(NamedTuple):
    """An op between its beginning and its end."""

    op: Op
    inputs: list[torch.Tensor]
    of_bad: bool
    kwargs: dict[str, Any]
    written: list[Overwritten]


class Trace(OpRecorder[_Running]):
    """Records while attached; afterwards answers where a tensor came from.

    Only tensors that hold a NaN or an infinity, and what they were made of, are kept alive.
    """

    def __init__(self, calls: ModuleCalls) -> None:
        super().__init__(calls.hooks, calls.hooks.guard or Guard(), runs_eagerly=True)
        self.ops: list[Op] = []
        self.backward_frame: FrameType | None = None
        """Our frame below which a running backward stands; frames above it are the user's own backward code."""
        self.late = False
        self.paused = False
        """Whether ops only run: a backward that nothing is asked about."""
        self._calls = calls
        self._layers = LayerWatch(calls)
        self._nodes: NodeMakers[Op] = NodeMakers()
        self._room_bytes = _MOST_REMEMBERED_BYTES
        self._users: dict[int, list[tuple[Op, torch.Tensor]]] = {}
        """By place in memory: what was given to an op may be overwritten through another view of it."""
        self._known: dict[int, _Known] = {}
        self._by_place: dict[tuple[Any, ...], Op] = {}
        self._writers: dict[int, list[Op]] = {}
        self._kept: list[torch.Tensor] = []
        self._copied: dict[int, torch.Tensor] = {}
        """What a copy was made of."""

    def attach(self, stack: ExitStack, height: int | None = None) -> None:
        """Record until the stack closes."""
        self._layers.attach(stack)
        self._calls.attach(stack)
        self._nodes.skip()
        super().attach(stack, height)

    def layer_rows(self) -> tuple[LayerRow, ...]:
        """A row for each module call."""
        return self._layers.rows()

    def backward_begins(self, frame: FrameType, losses: tuple[torch.Tensor, ...], *, is_end: bool) -> None:
        """What runs below this frame belongs to a backward. A bad loss has its birth before that: then nothing is recorded."""
        self.backward_frame, self.paused = frame, is_end and any(map(is_bad, losses))

    def backward_ends(self, *, is_the_one: bool) -> None:
        """Its ops are over."""
        self.backward_frame, self.late = None, self.late or is_the_one

    def stands_for(self, recorded: torch.Tensor, made: torch.Tensor) -> None:
        """What is used in place of a tensor that was made again has come about as that one has."""
        self._stand_in(Overwritten(made, recorded, self.maker(made)), len(self.ops))

    def forward_of(self, op: Op) -> Op | None:
        """The forward op that a backward op is the derivative of; through the first backward for a double one."""
        seen: set[int] = set()
        current: Op | None = op
        while current is not None and current.backward and current.index not in seen:
            seen.add(current.index)
            current = None if current.node_sequence is None else self._nodes.of(current.node_sequence)
        return current if current is not op else None

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> _Running | None:
        """An op of the step; what it is about to overwrite is kept."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.paused or any(isinstance(tensor, FakeTensor) for tensor in inputs):
            return None
        op = self._begun(func, user_frame(caller, below=self.backward_frame))
        self._nodes.add(op, self.ops[-1] if self.ops and self.ops[-1].name.endswith("_") else None)
        bad_inputs = [self._is_bad(tensor, op.index) for tensor in inputs]
        op.parents = tuple(maker.index for maker in map(self.maker, inputs) if maker is not None)
        written = [self._overwritten(tensor) for tensor in written_by(func, args, kwargs)]
        self._save_for_users(written)
        return _Running(op, inputs, any(bad_inputs), kwargs, written)

    def ends(self, running: _Running, args: tuple[Any, ...], result: Any) -> None:
        """What it gave is looked at; where that is non-finite, all is kept."""
        op, written = running.op, running.written
        self.ops.append(op)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs += [one.tensor for one in written if not any(one.tensor is output for output in outputs)]
        self._made(op, outputs, of_bad=running.of_bad)
        if op.is_bad:  # what it was given, as it was then
            op.args, op.kwargs = _replaced((args, running.kwargs), {id(one.tensor): one.copy for one in written if one.copy is not None})
            op.written = tuple(one.tensor for one in written)
            for one in written:
                if memory := memory_of(one.tensor):
                    self._writers.setdefault(memory, []).append(op)
                self._stand_in(one, op.index)
            for tensor in op.inputs():
                self._users.setdefault(_number_of(tensor), []).append((op, tensor))
        elif not op.backward:  # what a clean one was given, in case its derivative is the birth; as long as there is room
            strided = (tensor for tensor in running.inputs if tensor.layout is torch.strided)
            self._room_bytes -= sum(tensor.numel() * tensor.element_size() for tensor in strided)
            if self._room_bytes > 0:
                op.args, op.kwargs = args, running.kwargs

    def maker(self, tensor: torch.Tensor) -> Op | None:
        """What made a tensor; None for what was there before the step."""
        known = self._known.get(id(tensor))
        if known is not None and known.reference() is tensor and known.op is not None:
            return known.op
        return None if id(tensor) in self._copied else self._by_place.get(_place(tensor) or ())

    def writers(self, tensor: torch.Tensor) -> list[Op]:
        """Ops that wrote non-finite values in place into its memory, the latest first."""
        return self._writers.get(memory_of(tensor), [])[::-1]

    def _is_bad(self, tensor: torch.Tensor, now: int) -> bool:
        """Whether a tensor that is read at the time `now` holds anything non-finite; looked at only if it may have changed."""
        known = self._known.get(id(tensor))
        if known is None or known.reference() is not tensor:
            known = _Known(weakref.ref(tensor), is_bad(tensor), self._by_place.get(_place(tensor) or ()), now)
            self._known[id(tensor)] = known
            self._kept += [tensor] if known.is_bad else []
        elif (writers := self._writers.get(memory_of(tensor))) and writers[-1].index > known.stamp:
            known.is_bad, known.stamp = is_bad(tensor), now
        return known.is_bad

    def _made(self, op: Op, outputs: list[torch.Tensor], *, of_bad: bool) -> None:
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

    def _stand_in(self, one: Overwritten, now: int) -> None:
        """The copy stands for what the tensor was: it has the tensor's earlier maker, not the op that overwrites it."""
        if one.copy is None or self._copied.get(id(one.copy)) is one.tensor:
            return
        self._copied[id(one.copy)] = one.tensor
        self._known[id(one.copy)] = _Known(weakref.ref(one.copy), is_bad(one.copy), one.maker, now)
        self._kept.append(one.copy)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a copy was made of before it was overwritten; any other tensor itself."""
        return self._copied.get(id(tensor), tensor)

    def _overwritten(self, tensor: torch.Tensor) -> Overwritten:
        return Overwritten(tensor, tensor.detach().clone() if memory_of(tensor) else None, self.maker(tensor))

    def failed(self, error: Exception) -> None:
        """A trace with a gap would blame another op: the replay fails."""
        raise error

    def _begun(self, func: Any, frame: FrameType | None) -> Op:
        node, name = torch._C._current_autograd_node(), op_name(func)
        call, node_sequence = self._calls.current, None if node is None or node._sequence_nr() >= _NO_SEQUENCE else node._sequence_nr()
        line = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name) if frame is not None else None
        backward = node is not None or self.backward_frame is not None
        if backward and line is not None and torch.is_grad_enabled():
            # Checkpointing runs forward code inside a backward: with gradients on, in the user's own frames.
            before = self._first_pass(node_sequence, name, line)
            backward = call is None and before is None
            call = call or (before.call if before is not None else None)
        return Op(
            index=len(self.ops),
            name=name,
            func=func,
            call=call,
            line=line,
            place=(frame.f_code, frame.f_lasti) if frame is not None else None,
            sequence=_get_sequence_nr() - 1,
            node_sequence=node_sequence,
            backward=backward,
            late=self.late,
        )

    def _first_pass(self, node_sequence: int | None, name: str, line: Line) -> Op | None:
        """The op that ran at the same line in the forward of the running node: a function runs its forward under its own number."""
        first = self._nodes.of(node_sequence) if node_sequence is not None else None
        if first is None:
            return None
        inside = itertools.takewhile(lambda op: op.sequence == node_sequence, itertools.islice(self.ops, first.index, None))
        return next((op for op in inside if (op.name, op.line) == (name, line)), None)

    def _save_for_users(self, written: list[Overwritten]) -> None:
        """Earlier ops were called with what this memory held then: give them the copy that is made before it is overwritten."""
        copies = {id(one.tensor): one for one in written}
        for one in written:
            for user, tensor in self._users.pop(_number_of(one.tensor), ()):
                before = copies[id(tensor)] if id(tensor) in copies else self._overwritten(tensor)
                copies[id(tensor)] = before
                if before.copy is not None:
                    self._stand_in(before, len(self.ops))
                    user.args, user.kwargs = _replaced((user.args, user.kwargs), {id(tensor): before.copy})


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    return tree_map(lambda leaf: by.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf, value) if by else value
