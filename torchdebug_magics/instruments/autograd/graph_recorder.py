"""Listens to every op of the steps that are recorded, and writes the tape."""

from __future__ import annotations

import ast
import sys
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchdebug_magics.instruments.autograd.faults.data.seen_at_once import OwnFunctions
from torchdebug_magics.instruments.autograd.faults.shared_memory import names_compared
from torchdebug_magics.instruments.autograd.sample_twins import Begun, SampleTwins
from torchdebug_magics.instruments.autograd.tape import RecordedOp, Tape, Use, note_of, target_span
from torchdebug_magics.instruments.autograd.token_twins import TokenTwins
from torchdebug_magics.probing.dispatch import modes, modes_aside
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import ModuleCalls
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.op_recorder import OpRecorder
from torchdebug_magics.probing.ops import op_name, written_by
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.syntax import called, nodes, targets_of, tree_of
from torchdebug_magics.probing.source.user_code import frames_above, is_module_code, is_user_code
from torchdebug_magics.probing.tensors import tensors_in

_MOST_CALLS = 12
_LEAST_OF_BYTES, _MOST_OF_BYTES = 64, 255
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
"""The gradient may be the second factor."""
_MOST_BYTES = 1 << 28
"""Of all copies of what was overwritten unseen."""
_MOST_OPS = 100_000
"""On the tape, of a cell without steps."""
_WITH_MODES = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
_MOST_TENSORS = 16
_MOST_SHARED_BYTES = 1 << 20
_AT_EACH_OP_BYTES = 1 << 16
_AT_EACH_OP_COUNT = 1_000
"""From there on it is looked once a backward pass, and the line of a write is not known as exactly."""


class Copied(NamedTuple):
    """What a part of a storage held."""

    layout: tuple[int, tuple[int, ...], tuple[int, ...]]
    """Offset, shape and strides."""
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Copied:
        """What a tensor holds now."""
        with modes_aside(), torch.no_grad():
            return cls((int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()), tensor.detach().clone())

    def part(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same part of the storage, as it is now."""
        return torch.empty(0, dtype=self.values.dtype, device=self.values.device).set_(storage, *self.layout)


class _Running(NamedTuple):
    """An op between its beginning and its end."""

    op: RecordedOp
    written: list[weakref.ref[torch.Tensor]]
    twins_begun: list[Begun | None]


class GraphRecorder(OpRecorder[_Running]):
    """Records while it is on. Keeps no tensor alive, save copies of what was overwritten unseen."""

    def __init__(self, hooks: Hooks, guard: Guard) -> None:
        super().__init__(hooks, guard)
        self.tape = Tape()
        self.is_on = False
        self.in_optimizer = False
        self._calls: ModuleCalls | None = None
        self._below = len(modes())
        self._stack = ExitStack()
        self.root_calls: dict[tuple[int, bool, bool], RootCall] = {}
        """The first op of each model, by (id of the model, gradients on, training mode)."""
        self.overwritten: dict[int, Copied] = {}
        """By storage, the first of the writes that PyTorch's version check cannot see."""
        self.twins = [SampleTwins(0), SampleTwins(1), TokenTwins()]
        """For samples along the first dimension, and along the second; empty once a backward pass has asked them."""
        self.comparisons: dict[tuple[Line | None, str], tuple[RecordedOp, tuple[str, ...]]] = {}
        """Ops that are given one memory twice, with the names under which they are, by the line and the op."""
        self.functions = OwnFunctions(guard)
        self._shared = SharedMemory()
        self._written: tuple[RecordedOp, list[weakref.ref[torch.Tensor]]] | None = None
        """The last op that wrote in place: PyTorch moves the versions when we have returned."""

    def on(self, roots: list[torch.nn.Module]) -> None:
        """Record from here."""
        if self.is_on:
            return
        self.is_on = True
        self._calls = ModuleCalls(roots, self._hooks)
        self._calls.attach(self._stack)
        self.tape.nodes.skip()
        self.attach(self._stack, self._below)

    def off(self) -> None:
        """Record no more; the tape stays."""
        if self.is_on:
            self.is_on = False
            self.settle()
            self._stack.close()
            self.functions.off()
            self.overwritten.clear()

    def forget(self) -> None:
        """Drop the tape, and all numbers of storages."""
        self.tape, self.twins = Tape(), []
        self.root_calls.clear()
        self.comparisons.clear()
        self.overwritten.clear()

    def settle(self) -> Tape:
        """The tape, whole up to here, with the versions that the last write in place has left."""
        if self._written is not None:
            op, tensors = self._written
            self._written = None
            now = [(use, ref()) for use, ref in zip(op.writes, tensors, strict=True)]
            op.moved = tuple(use.version + 1 if one is None or one.is_inference() else one._version for use, one in now)
        return self.tape

    def look_at_shared_memory(self) -> None:
        """Put on the tape what another library has written since the last op."""
        self._book_unseen_write(self._calls_around(self.lines.user_frame(sys._getframe(1))), is_last=True)

    def _book_unseen_write(self, calls: tuple[Line, ...], *, is_last: bool) -> None:
        if (changed := self._shared.changed(self.tape, is_last=is_last)) is not None:
            line = _line_between(self.tape.ops[-1].calls if self.tape.ops else (), calls)
            self.tape.add(RecordedOp(self.tape.count, "numpy", line, writes=(changed.use,), moved=(changed.use.version,)))
            self.overwritten.setdefault(changed.use.memory, changed.copied)

    def line_here(self) -> Line | None:
        """The innermost line of the user's code."""
        return self.lines.here(sys._getframe(1))

    def is_in_function(self) -> bool:
        """Whether the user's code that runs is, or is called by, a function, and not by the top of a cell or file alone."""
        return any(is_user_code(frame.f_code) and not is_module_code(frame.f_code) for frame in frames_above(sys._getframe(1)))

    def use(self, tensor: torch.Tensor) -> Use:
        """How a tensor is now."""
        memory = self.tape.numbers.of(tensor)
        return Use(
            memory,
            id(tensor),
            -1 if tensor.is_inference() else tensor._version,
            _span(tensor) if memory else (0, 0),
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.is_floating_point() or tensor.is_complex(),
            tuple(tensor.shape) if tensor.layout is torch.strided and not tensor.is_nested else (),
        )

    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> _Running:
        """The op as it is before it runs."""
        self.settle()
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            self.functions.meet(node, self.tape, caller)
        frame, call = self.lines.user_frame(caller), self._calls.current if self._calls is not None else None
        written, name = written_by(func, args, kwargs), op_name(func)
        self._keep_silently_written(func, written)
        op = RecordedOp(
            index=self.tape.count,
            name=name,
            line=self.lines.here(frame),
            module=None if call is None else call.path,
            module_type="" if call is None else call.type,
            grad_enabled=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            in_backward=torch._C._current_graph_task_id() != -1,
            in_optimizer=self.in_optimizer,
            reads=tuple(self.use(tensor) for tensor in tensors_in((args, kwargs))),
            writes=tuple(self.use(one) for one in written),
            calls=self._calls_around(frame),
            root=0 if call is None else id(call.root),
            training=call is None or call.root.training,
            note=note_of(name, args, frame),
            number=next((argument for argument in args if type(argument) in {int, float}), None),
            target_span=target_span(name, args),
        )
        places = [(use.memory, use.span, use.shape) for use in op.reads[:2]]
        is_twice_given = len(places) > 1 and places[0] == places[1] and op.reads[0].memory
        if is_twice_given and frame is not None and (op.line, name) not in self.comparisons and not op.writes and op.is_forward:
            self.comparisons[op.line, name] = op, names_compared(op, (args, kwargs), frame)
        before = self.tape.ops[-1] if self.tape.ops and op.grad_enabled else None
        self.tape.nodes.add(op, before if before is not None and before.writes else None)
        if not op.in_backward and not op.in_optimizer:
            self._book_unseen_write(op.calls, is_last=False)
            op.index = self.tape.count
            self._shared.meet(self.tape, op, (args, kwargs))
        if call is not None and not op.in_backward:
            key = (id(call.root), op.grad_enabled, call.root.training)
            known = self.root_calls.get(key) or RootCall.of(call.root, op)
            self.root_calls[key] = known.given(op, (args, kwargs), self.tape) if known.numbers is None and name != "lift_fresh" else known
        twins_begun = [twins.before(self.tape, op, None if call is None else call.root, func, (args, kwargs)) for twins in self.twins]
        return _Running(op, [weakref.ref(one) for one in written], twins_begun)

    def ends(self, running: _Running, args: tuple[Any, ...], result: Any) -> None:
        """The op has run: it goes on the tape."""
        op, written, twins_begun = running
        op.makes = tuple(self.use(tensor) for tensor in ([result] if isinstance(result, torch.Tensor) else tensors_in(result)))
        self._written = (op, written) if written else None
        if op.in_backward and not op.grad_enabled and op.name != "detach":  # of what was saved
            self._book_derivative(op, args, result)
        self.tape.add(op)
        if len(self.tape.ops) > _MOST_OPS:
            self.tape.clear()
        for twins, twin in zip(self.twins, twins_begun, strict=False):
            if twin is not None:
                twins.after(op, twin, args, result)

    def _book_derivative(self, op: RecordedOp, args: tuple[Any, ...], result: Any) -> None:
        """Which forward op it belongs to, and whether a gradient ends here."""
        node: Any = torch._C._current_autograd_node()
        maker = None if node is None else self.tape.nodes.of(node._sequence_nr())
        if maker is None or op.name in _PRODUCTS or not op.reads or not maker.makes or op.reads[0].shape != maker.makes[0].shape:
            return  # it is given something else than the gradient first
        to_input = next(iter(result), None) if isinstance(result, tuple) else result  # the others go to the weights
        tensors = [value for value in (*args[:1], to_input) if type(value) is torch.Tensor and value.is_floating_point()]
        if len(tensors) != 2 or any(each.layout is not torch.strided or each.is_meta or not each.numel() for each in tensors):  # noqa: PLR2004 - the gradient, and what became of it
            return
        with modes_aside(), torch.no_grad():
            if tensors[0].count_nonzero():
                op.derivative_of, op.is_zero = maker.index, not bool(tensors[1].count_nonzero())

    def _keep_silently_written(self, func: Any, written: list[torch.Tensor]) -> None:
        """A copy of what a graph may have saved, before a write that does not move its version."""
        if not written or torch._C._current_graph_task_id() != -1:
            return
        is_fused = op_name(func).startswith("_fused_")
        for tensor in written:
            memory = self.tape.numbers.of(tensor)
            is_unseen = (is_fused or not tensor.requires_grad) and memory in self.tape.graph_memory and memory not in self.overwritten
            if is_unseen and sum(one.values.nbytes for one in self.overwritten.values()) + tensor.nbytes < _MOST_BYTES:
                self.overwritten[memory] = Copied.of(tensor)

    def _calls_around(self, frame: FrameType | None) -> tuple[Line, ...]:
        lines: list[Line] = []
        while frame is not None and len(lines) < _MOST_CALLS and (line := self.lines.here(frame)) is not None:
            lines.append(line)
            frame = self.lines.user_frame(frame)
            frame = self.lines.user_frame(frame.f_back) if frame is not None else None
        return tuple(lines)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if not tensor.numel() or tensor.is_contiguous():
        return first, first + tensor.numel() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * size


class Numbers(NamedTuple):
    """What is known of an input."""

    largest: float
    """The largest absolute value."""
    are_bytes: bool
    """Whether all are whole, as those of a stored picture."""


class RootCall(NamedTuple):
    """A model as it was called."""

    root: weakref.ref[torch.nn.Module]
    op: RecordedOp
    modes: tuple[str, ...]
    """Its modules that compute something else in training mode than in evaluation mode: ``"drop (Dropout)"``."""
    name: str
    parameters: frozenset[int]
    """The ids of those that require a gradient."""
    numbers: Numbers | None = None
    """The first that it was given; of indices and masks, nothing is known."""

    @classmethod
    def of(cls, root: torch.nn.Module, op: RecordedOp) -> RootCall:
        """As it is now."""
        trainable = frozenset(id(parameter) for parameter in root.parameters() if parameter.requires_grad)
        kinds = ((path, one) for path, one in root.named_modules() if isinstance(one, _WITH_MODES) and getattr(one, "p", 1) > 0)
        modes = tuple(f"{path} ({type(one).__name__})" for path, one in kinds if getattr(one, "track_running_stats", True))
        return cls(weakref.ref(root), op, modes, variable_of(root) or type(root).__name__, trainable)

    def given(self, op: RecordedOp, values: Any, tape: Tape) -> RootCall:
        """With the numbers of its input, if the op is the first that is given one: others are given what the model has or makes."""
        root = self.root()
        own = set() if root is None else {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        others = ((tensor, tape.maker(use)) for tensor, use in zip(tensors_in(values), op.reads, strict=False) if id(tensor) not in own)
        first = next((tensor for tensor, maker in others if maker is None or maker.root != op.root), None)
        if first is None:
            return self
        if type(first) is not torch.Tensor or not first.is_floating_point() or not first.numel() or first.is_meta:
            return self._replace(numbers=Numbers(0.0, are_bytes=False))
        with modes_aside(), torch.no_grad():
            low, high = float(first.detach().min()), float(first.detach().max())
            are_bytes = low >= 0 and _LEAST_OF_BYTES < high <= _MOST_OF_BYTES and bool((first.detach() == first.detach().round()).all())
            return self._replace(numbers=Numbers(max(-low, high), are_bytes))


@dataclass
class _Kept:
    """A tensor as it was when it was last looked at."""

    storage: weakref.ref[torch.UntypedStorage]
    use: Use
    copied: Copied
    since: int
    """The index of the first op after the look."""


class SharedMemory:
    """Copies of small tensors that others can write: those that NumPy shares, and what is detached from a graph."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        """By the number of the storage."""

    def meet(self, tape: Tape, op: RecordedOp, given: Any) -> None:
        """An op is about to read its arguments; those of a graph count."""
        if not op.grad_enabled or not any(one.requires_grad for one in op.reads):
            return
        for tensor, use in zip(tensors_in(given), op.reads, strict=False):
            # Nobody else writes to another device.
            is_small = use.memory != 0 and tensor.device.type == "cpu" and tensor.nbytes <= _MOST_SHARED_BYTES
            is_new = is_small and use.memory not in self._kept and len(self._kept) < _MOST_TENSORS
            if is_new and (op.name == "detach" or not (use.requires_grad or tensor.untyped_storage().resizable())):
                self._kept[use.memory] = _Kept(weakref.ref(tensor.untyped_storage()), use, Copied.of(tensor), tape.count)

    def changed(self, tape: Tape, *, is_last: bool) -> _Kept | None:
        """What was written since the last look, and by no op; None where nothing was."""
        for number, kept in list(self._kept.items()):
            storage, before = kept.storage(), kept.copied.values
            if storage is None:
                del self._kept[number]
            elif is_last or (before.nbytes <= _AT_EACH_OP_BYTES and tape.count < _AT_EACH_OP_COUNT):
                with modes_aside(), torch.no_grad():
                    now = kept.copied.part(storage)
                    if torch.equal(now, before) or bool(before.isnan().any()):
                        continue
                    if any(write.memory == number for op in tape.since(kept.since) for write in op.writes):
                        kept.copied, kept.since = Copied.of(now), tape.count
                        continue
                return self._kept.pop(number)
        return None


def _line_between(before: tuple[Line, ...], after: tuple[Line, ...]) -> Line | None:
    """The statement between two lines of the innermost function that both stand in: one that assigns to a part of something, or calls."""
    for line in after:
        last = next((one for one in before if (one.file, one.function) == (line.file, line.function)), None)
        tree = tree_of(line.file)
        if last is None or tree is None:
            continue
        within = [node for node in nodes(ast.stmt, tree) if not hasattr(node, "body") and last.line < node.lineno < line.line]
        parts = [
            node
            for node in within
            if isinstance(node, ast.AugAssign) or any(isinstance(target, ast.Subscript) for target in targets_of(node))
        ]
        calls = [node for node in within if isinstance(node, ast.Expr) and called(node.value) not in {"", "zero_grad"}]
        statement = min(parts or calls, key=lambda node: node.lineno, default=None)
        return line if statement is None else Line(line.file, statement.lineno, line.function)
    return after[0] if after else None
