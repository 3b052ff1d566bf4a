"""What was recorded of the ops: plain data that keeps no tensor alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torchdebug_magics.instruments.autograd.recording.storage_numbers import StorageNumbers

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.notes import Note
    from torchdebug_magics.probing.lines import Line

__all__ = ["RecordedOp", "Tape", "Use"]


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


@dataclass(slots=True)
class RecordedOp:
    """One op as it ran."""

    index: int
    name: str
    line: Line | None
    """The innermost line of the user's code."""
    module: str | None
    """Module path; None outside every module."""
    module_type: str
    grad_enabled: bool
    inference: bool
    in_backward: bool
    in_optimizer: bool
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
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
    unknown: bool = False
    """Whether no op made one of the tensors that it reads, and that could have a gradient."""

    @property
    def parents(self) -> tuple[RecordedOp, ...]:
        """The ops that made what it reads."""
        return tuple(maker for _, maker in self.sources)

    @property
    def initializes(self) -> bool:
        """Whether it gives a leaf its values."""
        return any(one.is_leaf for one in self.writes)


@dataclass
class Tape:
    """The ops in the order in which they ran."""

    ops: list[RecordedOp] = field(default_factory=list)
    by_node: dict[int, RecordedOp] = field(default_factory=dict)
    """By the sequence number of the graph node that an op has made."""
    numbers: StorageNumbers = field(default_factory=StorageNumbers)
    count: int = 0
    """Of all ops, also of those that were dropped."""
    graph_memory: set[int] = field(default_factory=set)
    """Storages of tensors that belong to a graph, or that one was computed from."""
    _writers: dict[int, list[RecordedOp]] = field(default_factory=dict)
    _made: dict[int, RecordedOp] = field(default_factory=dict)
    """The latest op that returned a tensor, by the id of the tensor."""
    _filled: dict[int, RecordedOp] = field(default_factory=dict)
    """The same by its storage."""

    def add(self, op: RecordedOp) -> None:
        """An op that has ended."""
        op.index = self.count
        self.count += 1
        self.ops.append(op)
        made_by = [(use, self.maker(use)) for use in op.reads]
        op.sources = tuple((use, maker) for use, maker in made_by if maker is not None)
        op.unknown = any(maker is None and use.can_have_grad and not (use.is_leaf and use.requires_grad) for use, maker in made_by)
        if op.grad_enabled and any(one.requires_grad for one in op.reads):
            self.graph_memory.update(one.memory for one in (*op.reads, *op.makes))
        for one in op.writes:
            self._writers.setdefault(one.memory, []).append(op)
        for one in op.makes:
            self._made[one.tensor] = self._filled[one.memory] = op

    def drop_before(self, index: int) -> None:
        """Forget the ops before that one."""
        kept = [op for op in self.ops if op.index >= index]
        nodes = {number: op for number, op in self.by_node.items() if op.index >= index}
        self.ops, self.by_node = [], nodes
        self._writers, self._made, self._filled, self.graph_memory = {}, {}, {}, set()
        for op in kept:
            number = op.index
            self.add(op)
            op.index, self.count = number, self.count - 1

    def since(self, index: int) -> list[RecordedOp]:
        """The ops from that one on."""
        return [op for op in self.ops if op.index >= index]

    def writers(self, use: Use, after: RecordedOp) -> Iterator[tuple[RecordedOp, Use, int]]:
        """(op, what it wrote, version afterwards) of each later write to the same elements, or to another view of them."""
        for op in self._writers.get(use.memory, ()):
            if op.index > after.index:
                for written, version in zip(op.writes, op.moved, strict=False):
                    if written.memory == use.memory:
                        yield op, written, version

    def maker(self, use: Use) -> RecordedOp | None:
        """The latest op that made this tensor; of one that no op was seen to make, the latest that wrote its memory."""
        made = self._made.get(use.tensor)
        if made is not None and any(one.tensor == use.tensor and one.memory == use.memory for one in made.makes):
            return made
        return self._filled.get(use.memory) if use.memory else None

    def graph_of(self, root: int) -> list[RecordedOp]:
        """The ops that the graph of the tensor with that id is made of: those through which its gradient flows."""
        todo, found = [op for op in self.ops if any(one.tensor == root for one in op.makes)][-1:], dict[int, RecordedOp]()
        while todo:
            op = todo.pop()
            if op.index not in found:
                found[op.index] = op
                # Inside a function whose backward the user has written, gradients are off.
                inputs = [maker for use, maker in op.sources if use.requires_grad or not op.grad_enabled]
                todo += [maker for maker in inputs if not maker.in_optimizer and not maker.initializes]
        return list(found.values())

    def clear(self) -> None:
        """Forget all ops; their numbers go on."""
        self.drop_before(self.count)

    def consumers(self) -> dict[int, list[RecordedOp]]:
        """The ops that read what an op made, by the index of that op."""
        found: dict[int, list[RecordedOp]] = {}
        for op in self.ops:
            for parent in op.parents:
                found.setdefault(parent.index, []).append(op)
        return found
