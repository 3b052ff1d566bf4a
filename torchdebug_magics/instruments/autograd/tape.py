"""What was recorded: ops, backward passes, updates and gradients set to zero. Plain data that keeps no tensor alive."""

from __future__ import annotations

import ast
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.graphs import NodeMakers
from torchdebug_magics.probing.source.call_sites import node_at, value_of
from torchdebug_magics.probing.source.lines import Line
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import sums_to_one, tensors_in
from torchdebug_magics.report import Location

Note: TypeAlias = Literal["", "wraps a graph", "takes probabilities", "takes logits", "too few frames"]
DISTANCES = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})
_WITH_TARGETS = DISTANCES | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_ROUNDING = 16
_NO_LOGARITHM, _MOST_TARGETS = 1e-3, 10_000
_MOST_EVENTS = 512


class StorageNumbers:
    """Keeps no storage alive."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """By address."""

    def of(self, tensor: torch.Tensor) -> int:
        """0 for a tensor without a storage of its own."""
        if not (place := memory_of(tensor)):
            return 0
        # Where the storage begins, asked without making a memory its own that it shares until somebody writes.
        address = int(torch._C._data_address(tensor)) or place  # type: ignore[attr-defined]
        known = self._known.get(address)
        if known is None or known[0]() is None:  # two that are alive at one address are one memory, as with `torch.from_dlpack`
            known = self._known[address] = weakref.ref(tensor.untyped_storage()), next(self._next)
        return known[1]


class Use(NamedTuple):
    """A tensor as one op was given it, or returned it."""

    memory: int
    """A number for its storage, never used again for another one; 0 where it has none of its own."""
    tensor: int
    """The id of the tensor object, which may be another's later."""
    version: int
    span: tuple[int, int]
    """The bytes of its storage from its first to behind its last element."""
    requires_grad: bool
    is_leaf: bool
    can_have_grad: bool
    """Whether its dtype is floating or complex."""
    shape: tuple[int, ...]

    def overlaps(self, other: Use) -> bool:
        """Whether both may hold the same element."""
        return self.memory == other.memory != 0 and self.span[0] < other.span[1] and other.span[0] < self.span[1]


class _AtLine:
    """What the user's code does in one of its lines."""

    __slots__ = ()
    line: Line | None
    """The innermost line of the user's code."""

    @property
    def where(self) -> Location | None:
        """The line, as a report shows it."""
        return self.line.location if self.line is not None else None

    @property
    def source(self) -> str:
        """The text of the line."""
        return self.line.location.source if self.line is not None else ""


@dataclass(slots=True)
class RecordedOp(_AtLine):
    """One op as it ran."""

    index: int
    name: str
    line: Line | None
    module: str | None = None
    """Module path; None outside every module."""
    module_type: str = ""
    grad_enabled: bool = True
    inference: bool = False
    in_backward: bool = False
    in_optimizer: bool = False
    reads: tuple[Use, ...] = ()
    writes: tuple[Use, ...] = ()
    """As they were before the op."""
    calls: tuple[Line, ...] = ()
    """The user's own calls in which it ran, the innermost first."""
    makes: tuple[Use, ...] = ()
    moved: tuple[int, ...] = ()
    """The version of each of `writes` after the op."""
    sources: tuple[tuple[Use, RecordedOp], ...] = field(default=(), repr=False)
    """What it reads, with the op that made it; what was there before is not among them."""
    root: int = 0
    """The id of the model in which it ran."""
    training: bool = True
    """Whether that was in training mode."""
    note: Note = ""
    number: float | None = None
    """The first number that it is given beside tensors: a dimension, a factor, a way to reduce."""
    target_span: tuple[float, float] | None = None
    unknown: bool = False
    """Whether no op made one of the tensors that it reads, and that could have a gradient."""
    derivative_of: int = -1
    """In a backward pass: the index of the forward op whose derivative it computes, from a gradient that is not all zero."""
    is_zero: bool = False
    """Whether that derivative is 0 for every element."""

    @property
    def parents(self) -> tuple[RecordedOp, ...]:
        """The ops that made what it reads."""
        return tuple(maker for _, maker in self.sources)

    @property
    def initializes(self) -> bool:
        """Whether it gives a leaf its values, and is no part of a graph, as ``batch_norm`` is, which also writes its statistics."""
        return any(write.is_leaf for write in self.writes) and not (self.grad_enabled and any(use.requires_grad for use in self.reads))

    @property
    def is_forward(self) -> bool:
        """Whether it computes something from its inputs, outside of backward passes and updates."""
        return not self.in_backward and not self.in_optimizer and not self.initializes


@dataclass
class Tape:
    """The ops in the order in which they ran."""

    ops: list[RecordedOp] = field(default_factory=list)
    nodes: NodeMakers[RecordedOp] = field(default_factory=NodeMakers)
    """The op that has made each node of a graph."""
    numbers: StorageNumbers = field(default_factory=StorageNumbers)
    count: int = 0
    """Of all ops, also of those that were dropped."""
    graph_memory: set[int] = field(default_factory=set)
    """Storages of tensors that belong to a graph, or that one was computed from."""
    _writers: dict[int, list[RecordedOp]] = field(default_factory=dict)
    _made: dict[int, RecordedOp] = field(default_factory=dict)
    """The latest op that returned a tensor, by the id of the tensor."""
    _filled: dict[int, RecordedOp] = field(default_factory=dict)
    """The same by its storage, but for views: what they are of was there before."""

    def add(self, op: RecordedOp) -> None:
        """An op that has ended."""
        op.index = self.count
        self.count += 1
        self.ops.append(op)
        made_by = [(use, self.maker(use)) for use in op.reads]
        op.sources = tuple((use, maker) for use, maker in made_by if maker is not None)
        op.unknown = any(maker is None and use.can_have_grad and not (use.is_leaf and use.requires_grad) for use, maker in made_by)
        if op.grad_enabled and any(use.requires_grad for use in op.reads):
            self.graph_memory.update(use.memory for use in (*op.reads, *op.makes))
        for use in op.writes:
            self._writers.setdefault(use.memory, []).append(op)
        viewed = {use.memory for use in op.reads} - {use.memory for use in op.writes}
        for use in op.makes:
            self._made[use.tensor] = op
            if use.memory not in viewed:
                self._filled[use.memory] = op

    def drop_before(self, index: int) -> None:
        """Forget the ops before that one."""
        kept = [op for op in self.ops if op.index >= index]
        self.nodes.keep(lambda op: op.index >= index)
        self.ops = []
        self._writers, self._made, self._filled, self.graph_memory = {}, {}, {}, set()
        for op in kept:
            number = op.index
            self.add(op)
            op.index, self.count = number, self.count - 1

    def since(self, index: int) -> list[RecordedOp]:
        """The ops from that one on."""
        return [op for op in self.ops if op.index >= index]

    def writers(self, use: Use, after: RecordedOp) -> Iterator[tuple[RecordedOp, int]]:
        """(op, version afterwards) of each later write to the same memory."""
        later = (op for op in self._writers.get(use.memory, ()) if op.index > after.index)
        writes = ((op, *write) for op in later for write in zip(op.writes, op.moved, strict=False))
        return ((op, version) for op, written, version in writes if written.memory == use.memory)

    def maker(self, use: Use) -> RecordedOp | None:
        """The latest op that made this tensor; of one that no op was seen to make, the latest that wrote its memory."""
        made = self._made.get(use.tensor)
        if made is not None and any(made.tensor == use.tensor and made.memory == use.memory for made in made.makes):
            return made
        return self._filled.get(use.memory) if use.memory else None

    def origin(self, tensor: int, before: int | None = None) -> RecordedOp | None:
        """The latest op that returned the tensor with that id; from op `before` on, the id is another tensor's."""
        ops = (op for op in reversed(self.ops) if before is None or op.index < before)
        return next((op for op in ops if any(use.tensor == tensor for use in op.makes)), None)

    def ancestors(self, tensor: int, before: int | None = None, *, in_graph: bool = False) -> Iterator[RecordedOp]:
        """The ops that computed the tensor with that id, the nearest first; with `in_graph`, those that its gradient flows through."""

        def makers(op: RecordedOp) -> Iterator[RecordedOp]:
            for use, maker in op.sources:
                # Inside a function whose backward the user has written, gradients are off.
                has_gradient = (use.requires_grad or not op.grad_enabled) and not maker.initializes
                if not maker.in_optimizer and (has_gradient if in_graph else not maker.in_backward):
                    yield maker

        return walk(filter(None, [self.origin(tensor, before)]), makers)

    def clear(self) -> None:
        """Forget all ops; their numbers go on."""
        self.drop_before(self.count)

    def consumers(self) -> dict[int, list[RecordedOp]]:
        """The ops that read what an op made, by the index of that op."""
        readers: dict[int, list[RecordedOp]] = {}
        for op in self.ops:
            for parent in op.parents:
                readers.setdefault(parent.index, []).append(op)
        return readers


def walk(starts: Iterable[RecordedOp], following: Callable[[RecordedOp], Iterable[RecordedOp]]) -> Iterator[RecordedOp]:
    """The ops that can be reached, each once, the nearest first."""
    todo, seen = deque(starts), set[int]()
    while todo:
        op = todo.popleft()
        if op.index not in seen:
            seen.add(op.index)
            yield op
            todo += following(op)


@dataclass(slots=True, eq=False)
class Event(_AtLine):
    """A call that belongs to the course of a training."""

    line: Line | None


@dataclass(slots=True, eq=False)
class Backward(Event):
    """One call of backward() or grad()."""

    is_recorded: bool = False
    """Whether it is one of a loss, in a step that is recorded."""
    index: int = 0
    """How many ops were recorded before it."""
    ops: frozenset[int] = frozenset()
    """The indices of the ops in its graph."""
    leaves: frozenset[int] = frozenset()
    """The ids of the tensors at which its gradients arrive."""
    left_over: frozenset[int] = frozenset()
    """Of these, the ones that had a gradient other than zero already."""
    loss_is_leaf: bool = False
    loss: int = 0
    """The id of the first tensor that it was called on."""
    node: int = -1
    """The number that autograd has given to the node which made it; -1 for a leaf."""
    failed: bool = False
    constants: frozenset[int] = frozenset()
    """The ids of the gradients that ``grad()`` returned without a graph."""


@dataclass(slots=True, eq=False)
class OptimizerStep(Event):
    """One call of an optimizer's step()."""

    optimizer: int = 0
    """Its id."""
    is_recorded: bool = False
    name: str = "optimizer"
    parameters: frozenset[int] = frozenset()
    """The ids of its tensors that require a gradient."""
    without: frozenset[int] = frozenset()
    """Of these, the ones without a gradient."""
    nonzero: frozenset[int] = frozenset()
    """The ids of those with a gradient that is not all zero."""


@dataclass(slots=True, eq=False)
class Zeroed(Event):
    """One call of zero_grad(), of an optimizer or a module."""

    parameters: frozenset[int] = frozenset()
    is_read: bool = True
    """Whether an op has read one of the gradients before."""


@dataclass
class EventCourse:
    """The latest recorded events; the counts are of all."""

    events: list[Event] = field(default_factory=list)
    backward_count: int = 0
    recorded_count: int = 0
    steps_count: int = 0
    stepped: set[int] = field(default_factory=set)
    """The ids of all optimizers that made an update."""

    @property
    def backwards(self) -> list[Backward]:
        """The recorded backward passes."""
        return [event for event in self.events if isinstance(event, Backward) and event.is_recorded]

    @property
    def steps(self) -> list[OptimizerStep]:
        """The recorded updates."""
        return [event for event in self.events if isinstance(event, OptimizerStep) and event.is_recorded]

    def add(self, event: Event) -> None:
        """One more. Of a row that was not recorded only the first is kept: it pushes nothing out, and keeps apart what is around it."""
        if isinstance(event, Backward):
            self.backward_count += 1
            self.recorded_count += event.is_recorded
        elif isinstance(event, OptimizerStep):
            self.steps_count += 1
            self.stepped.add(event.optimizer)
        if _was_seen(event) or not self.events or _was_seen(self.events[-1]):
            self.events = [*self.events[-_MOST_EVENTS:], event]


def _was_seen(event: Event) -> bool:
    """Whether more is known of it than its line."""
    return bool(getattr(event, "parameters", ()) or getattr(event, "ops", ()) or getattr(event, "is_recorded", False))


def note_of(name: str, args: tuple[Any, ...], frame: FrameType | None) -> Note:
    """Of an op that is about to run in the line at which a frame stands."""
    is_loss = name.startswith("nll_loss") and name.endswith("_forward") and type(args[0]) is torch.Tensor and args[0].ndim > 1
    note: Note = _instead_of_logarithms(args[0], 1) if is_loss else ""
    if name == "lift_fresh" and frame is not None and _wraps_graph(frame):
        note = "wraps a graph"
    elif name == "_log_softmax" and _sums_to_one(args[0], args[1]):
        note = "takes probabilities"
    elif name == "_ctc_loss" and _has_too_few_frames(*args[1:4]):
        note = "too few frames"
    return note


def _has_too_few_frames(targets: torch.Tensor, frames: Any, letters: Any) -> bool:
    """Whether most targets have more letters than their samples have frames; between two that are equal, there must be a blank."""
    if targets.is_meta:
        return False
    with modes_aside(), torch.no_grad():
        lengths: list[int] = torch.as_tensor(letters).tolist()
        room: list[int] = torch.as_tensor(frames).tolist()
        rows = targets if targets.ndim > 1 else targets.split(lengths)
        words = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        are_short = [len(word) + int((word[1:] == word[:-1]).sum()) > count for word, count in zip(words, room, strict=True)]
        return 2 * sum(are_short) > len(are_short)


def _instead_of_logarithms(values: torch.Tensor, dim: int) -> Note:
    """What a loss of log-probabilities is given: these are never above 0."""
    if not values.requires_grad or values.is_meta:
        return ""
    if _sums_to_one(values, dim):
        return "takes probabilities"
    with modes_aside(), torch.no_grad():
        return "takes logits" if values.numel() and bool(values.max() > _NO_LOGARITHM) else ""


def target_span(name: str, args: tuple[Any, ...]) -> tuple[float, float] | None:
    """Between which values the targets of a loss lie; of a distance, nine in ten of them."""
    targets = args[1] if name in _WITH_TARGETS and args[0].requires_grad else None
    if type(targets) is not torch.Tensor or not targets.numel() or targets.is_meta:
        return None
    with modes_aside(), torch.no_grad():
        if name not in DISTANCES:
            return float(targets.min()), float(targets.max())
        ordered = targets.detach().flatten()[:_MOST_TARGETS].float().sort().values
        return float(ordered[len(ordered) // 20]), float(ordered[-1 - len(ordered) // 20])


def _wraps_graph(frame: FrameType) -> bool:
    """Whether ``torch.tensor(losses)`` is called with tensors that require a gradient: their numbers are read without an op."""
    call = node_at(frame)
    if not isinstance(call, ast.Call) or not call.args:
        return False
    return any(tensor.requires_grad for tensor in tensors_in(_held(call.args[0], frame)))


def _held(node: ast.expr, frame: FrameType, known: Mapping[str, Any] = MappingProxyType({})) -> list[Any]:
    """The values of a list that is written there, where reading them calls nothing."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [part for elt in node.elts for part in _held(elt, frame, known)]
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and isinstance(target := node.generators[0].target, ast.Name):
        return [
            part for item in _held(node.generators[0].iter, frame, known) for part in _held(node.elt, frame, {**known, target.id: item})
        ]
    value = value_of(node, frame, {**local_values(frame), **known})
    return list(value) if type(value) in {list, tuple} else [value]


def _sums_to_one(logits: torch.Tensor, dim: int) -> bool:
    """Whether what is to become a distribution by a softmax is one already."""
    if not logits.requires_grad or logits.layout is not torch.strided or logits.is_meta:
        return False
    with modes_aside(), torch.no_grad():
        return sums_to_one(logits.detach(), dim, _ROUNDING * torch.finfo(logits.dtype).eps)
