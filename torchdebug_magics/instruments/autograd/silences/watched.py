"""What is noted at each backward pass, update and zero_grad() of a recorded step."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.named import stepped_name
from torchdebug_magics.instruments.autograd.silences.leaking_batch import BatchLeak
from torchdebug_magics.instruments.autograd.silences.stale_values import StaleValue, stale_value
from torchdebug_magics.instruments.autograd.training_course import Backward, Course, Step, Zeroed
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.modules import live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.shards import gathered_for, is_shard, local_of, shards_may_be

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.graph_recorder import Recorder

__all__ = ["Watched", "is_nonzero", "tensors_of"]


_MOST_DROPPED = 4


class Watched:
    """Fills the course; keeps no tensor and no optimizer alive."""

    def __init__(self, recorder: Recorder, course: Course) -> None:
        self.recorder = recorder
        self.course = course
        self.stale: StaleValue | None = None
        self.leak = BatchLeak(recorder)
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._steps: Counter[int] = Counter()
        self._dropped: list[tuple[weakref.ref[torch.Tensor], StorageWeakRef]] = []
        """(the owner, the storage) of some gradients that are set to zero just now."""

    def steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How often it was stepped."""
        return self._steps[id(optimizer)]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and are alive."""
        return [one for ref in self._optimizers.values() if (one := ref()) is not None]

    def updated(self) -> set[int]:
        """The ids of all tensors that an update was made of."""
        return {key for one in self.course.steps for key in one.parameters}

    def written_by_hand(self) -> frozenset[int]:
        """Storages that the user's code writes once they were used, and a backward pass has begun: no optimizer's update."""
        first = self.course.backwards[0].index if self.course.backwards else 0
        used, written = set[int](), set[int]()
        for op in self.recorder.tape.ops:
            if op.in_optimizer or op.in_backward:
                continue
            if op.index >= first:
                written.update(use.memory for use in op.writes if use.memory in used)
            if op.grad_enabled:
                used.update(use.memory for use in op.reads)
        return frozenset(written)

    def backward(self, tensors: tuple[torch.Tensor, ...], *, is_loss: bool) -> Backward:
        """A pass begins: what it will reach, and which gradients are there already."""
        recorder, line = self.recorder, self.recorder.line_here()
        if not recorder.is_on:
            return Backward(line)
        tape = recorder.settle()
        recorder.look_at_shared_memory()
        graph = [op for tensor in tensors for op in tape.graph_of(id(tensor))]
        leaves = frozenset(use.tensor for op in graph for use in op.reads if use.is_leaf and use.requires_grad)
        leaves = _with_shards(leaves, tensors, [one for optimizer in self.optimizers() for one in tensors_of(optimizer)])
        with _disable_current_modes(), torch.no_grad():
            held = [one for optimizer in self.optimizers() for one in tensors_of(optimizer)] or leaves_of(tensors)
            left = frozenset(id(one) for one in held if id(one) in leaves and is_nonzero(one.grad))
        loss = tensors[0] if tensors else None
        if is_loss and self.stale is None:
            self.stale = stale_value(recorder, tensors)
        if is_loss and loss is not None:
            self.leak.look(loss)
        return Backward(
            line,
            is_recorded=is_loss,
            index=tape.count,
            ops=frozenset(op.index for op in graph),
            leaves=leaves,
            left_over=left,
            loss_is_leaf=loss is not None and loss.is_leaf and loss.requires_grad,
            loss=id(loss),
        )

    def step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> Step:
        """An update begins: which of its tensors have a gradient; with a closure, that one computes them."""
        self._steps[id(optimizer)] += 1
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        if not self.recorder.is_on or has_closure:
            return Step(self.recorder.line_here(), id(optimizer))
        with _disable_current_modes(), torch.no_grad():
            tensors = [one for one in tensors_of(optimizer) if one.requires_grad]
            line = self.recorder.line_here()
            return Step(
                line,
                id(optimizer),
                is_recorded=True,
                name=variable_of(optimizer) or stepped_name(line.location if line is not None else None) or "optimizer",
                parameters=frozenset(map(id, tensors)),
                without=frozenset(id(one) for one in tensors if one.grad is None),
                nonzero_count=sum(is_nonzero(one.grad) for one in tensors),
            )

    def zeroed(self, holder: torch.optim.Optimizer | torch.nn.Module) -> Zeroed:
        """``zero_grad()`` is called."""
        if not self.recorder.is_on:
            return Zeroed(self.recorder.line_here())
        held = list(tensors_of(holder) if isinstance(holder, torch.optim.Optimizer) else holder.parameters())
        return Zeroed(self.recorder.line_here(), frozenset(map(id, held)), is_read=self._is_read(held))

    def _is_read(self, tensors: list[torch.nn.Parameter] | list[torch.Tensor]) -> bool:
        """Whether an op has read one of their gradients since the latest backward pass began."""
        tape, begun = self.recorder.settle(), self.course.backwards[-1:]
        gradients = {tape.numbers.of(one.grad) for one in tensors if one.grad is not None}
        later = [op for op in tape.since(begun[0].index) if not op.in_backward] if begun else []
        self._dropped = [
            (weakref.ref(one), StorageWeakRef(one.grad.untyped_storage())) for one in tensors[:_MOST_DROPPED] if _has_storage(one.grad)
        ]
        return any(use.memory in gradients for op in later for use in op.reads)

    def is_zeroed(self, event: Zeroed) -> None:
        """``zero_grad()`` has ended: a gradient that it dropped, and that is there, is held by someone."""
        held = [not storage.expired() for owner, storage in self._dropped if (one := owner()) is not None and one.grad is None]
        event.is_read = event.is_read or any(held)
        self._dropped = []


def _has_storage(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return gradient is not None and gradient.layout is torch.strided and not gradient.is_meta


def _with_shards(leaves: frozenset[int], tensors: tuple[torch.Tensor, ...], updated: list[torch.Tensor]) -> frozenset[int]:
    """With the DTensors that the graphs end in, by what FSDP and tensor parallelism do to them on the way: no op is seen to do it."""
    ends = leaves_of(tensors) if shards_may_be() else []
    is_all_updated = set(map(id, updated)).issuperset(map(id, ends))  # then nothing was gathered for it, and no module is looked for
    gathered = {} if is_all_updated else gathered_for(live_modules())
    found = (gathered.get(id(one), one) for one in ends)
    return leaves - gathered.keys() | {id(one) for one in found if is_shard(one)}


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Whether there is one, and it is not all zero; of a DTensor, in this process."""
    if gradient is None or gradient.is_meta:
        return False
    values = gradient._values() if gradient.layout is torch.sparse_coo else local_of(gradient)
    return bool(values.count_nonzero())
