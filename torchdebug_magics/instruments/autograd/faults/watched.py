"""What is noted at each backward pass, update and zero_grad() of a recorded step, and what is known of each parameter."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.faults.leaking_batch import BatchLeak
from torchdebug_magics.instruments.autograd.faults.stale import StaleValue, stale_value
from torchdebug_magics.instruments.autograd.graph_recorder import Recorder
from torchdebug_magics.instruments.autograd.named import named_members, root_modules, stepped_name
from torchdebug_magics.instruments.autograd.tape import Backward, Course, Step, Zeroed
from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.modules import live_kinds, live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.storages import gathered_for, is_shard, local_of, shards_may_be

_MOST_DROPPED = 4


class Watched:
    """Fills the course; keeps no tensor and no optimizer alive."""

    def __init__(self, recorder: Recorder, course: Course) -> None:
        self.recorder = recorder
        self.course = course
        self.stale: StaleValue | None = None
        self.leak = BatchLeak(recorder)
        self.steps: Counter[int] = Counter()
        """How often each optimizer was stepped, by its id."""
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._dropped: list[tuple[weakref.ref[torch.Tensor], StorageWeakRef]] = []
        """(the owner, the storage) of some gradients that are set to zero just now."""

    def updated(self) -> set[int]:
        """The ids of the tensors that an optimizer has updated in a recorded step."""
        return {key for one in self.course.steps for key in one.parameters}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and are alive."""
        return [one for ref in self._optimizers.values() if (one := ref()) is not None]

    def backward(self, tensors: tuple[torch.Tensor, ...], *, is_loss: bool) -> Backward:
        """A pass begins: what it will reach, and which gradients are there already."""
        recorder, line = self.recorder, self.recorder.line_here()
        if not recorder.is_on:
            return Backward(line)
        tape = recorder.settle()
        recorder.look_at_shared_memory()
        graph = [op for tensor in tensors for op in tape.ancestors(id(tensor), in_graph=True)]
        leaves = frozenset(use.tensor for op in graph for use in op.reads if use.is_leaf and use.requires_grad)
        updated = [one for optimizer in self.optimizers() for one in tensors_of(optimizer)]
        leaves = _with_shards(leaves, tensors, updated)
        with _disable_current_modes(), torch.no_grad():
            left = frozenset(id(one) for one in updated or leaves_of(tensors) if id(one) in leaves and _is_nonzero(one.grad))
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
        self.steps[id(optimizer)] += 1
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        line = self.recorder.line_here()
        if not self.recorder.is_on or has_closure:
            return Step(line, id(optimizer))
        with _disable_current_modes(), torch.no_grad():
            tensors = [one for one in tensors_of(optimizer) if one.requires_grad]
            return Step(
                line,
                id(optimizer),
                is_recorded=True,
                name=variable_of(optimizer) or stepped_name(line.location if line is not None else None) or "optimizer",
                parameters=frozenset(map(id, tensors)),
                without=frozenset(id(one) for one in tensors if one.grad is None),
                nonzero_count=sum(_is_nonzero(one.grad) for one in tensors),
            )

    def zeroed(self, holder: torch.optim.Optimizer | torch.nn.Module) -> Zeroed:
        """``zero_grad()`` is called: whether an op has read one of the gradients since the latest backward pass began."""
        if not self.recorder.is_on:
            return Zeroed(self.recorder.line_here())
        tensors = list(tensors_of(holder) if isinstance(holder, torch.optim.Optimizer) else holder.parameters())
        tape, begun = self.recorder.settle(), self.course.backwards[-1:]
        gradients = {tape.numbers.of(one.grad) for one in tensors if one.grad is not None}
        later = [op for op in tape.since(begun[0].index) if not op.in_backward] if begun else []
        some = [(one, one.grad) for one in tensors[:_MOST_DROPPED] if one.grad is not None]
        dense = [(one, gradient) for one, gradient in some if gradient.layout is torch.strided and not gradient.is_meta]
        self._dropped = [(weakref.ref(one), StorageWeakRef(gradient.untyped_storage())) for one, gradient in dense]
        is_read = any(use.memory in gradients for op in later for use in op.reads)
        return Zeroed(self.recorder.line_here(), frozenset(map(id, tensors)), is_read=is_read)

    def is_zeroed(self, event: Zeroed) -> None:
        """``zero_grad()`` has ended: a gradient that it dropped, and that is there, is held by someone."""
        held = [not storage.expired() for owner, storage in self._dropped if (one := owner()) is not None and one.grad is None]
        event.is_read = event.is_read or any(held)
        self._dropped = []


def _with_shards(leaves: frozenset[int], tensors: tuple[torch.Tensor, ...], updated: list[torch.Tensor]) -> frozenset[int]:
    """With the DTensors that the graphs end in, by what FSDP and tensor parallelism do to them on the way: no op is seen to do it."""
    ends = leaves_of(tensors) if shards_may_be() else []
    is_all_updated = set(map(id, updated)).issuperset(map(id, ends))  # then nothing was gathered for it, and no module is looked for
    gathered = {} if is_all_updated else gathered_for(live_modules())
    sharded = (gathered.get(id(one), one) for one in ends)
    return leaves - gathered.keys() | {id(one) for one in sharded if is_shard(one)}


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """In the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Whether there is one, and it is not all zero; of a DTensor, in this process."""
    if gradient is None or gradient.is_meta:
        return False
    values = gradient._values() if gradient.layout is torch.sparse_coo else local_of(gradient)
    return bool(values.count_nonzero())


class Facts:
    """What is known of the parameters that are alive. Held only while the recorded steps are judged."""

    def __init__(self, watched: Watched) -> None:
        alive = live_kinds(torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.nn.Parameter)
        self.watched, self.course, self.tape = watched, watched.course, watched.recorder.tape
        self.roots = root_modules(alive[torch.nn.Module])
        self.scalers: list[torch.amp.GradScaler] = alive[torch.amp.GradScaler]
        self.optimizers = watched.optimizers()
        """Those that have stepped."""
        self.all_optimizers: list[torch.optim.Optimizer] = [
            one for one in alive[torch.optim.Optimizer] if "param_groups" in vars(one)
        ]  # a constructor that raised may leave another
        self.parameters = {id(one): one for root in self.roots for one in root.parameters()}
        """Of models, by their ids."""
        self.loose = {id(one): one for one in alive[torch.nn.Parameter] if id(one) not in self.parameters}
        """Parameters that are registered in no module."""
        self.names = {id(one): name for name, one in reversed(list(named_members(self.roots)))}
        """Of parameters and buffers, as in `state_dict`."""
        self.reached = {key for one in self.course.backwards for key in one.leaves}
        """The ids of the tensors that a recorded backward pass has reached."""
        self.updated = watched.updated()
        self.held = self.updated | {id(tensor) for one in self.all_optimizers for tensor in tensors_of(one)}
        """The ids of the tensors that an optimizer has."""
        self._by_hand = self._written_by_hand()

    def names_of(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Of those that belong to a model."""
        return tuple(self.names[id(one)] for one in tensors if id(one) in self.names)

    def not_updated(self, parameters: Mapping[int, torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
        """Those that get gradients, and that neither an optimizer nor the user's code updates."""
        wanted = self.reached - self.held
        return {key: one for key, one in parameters.items() if key in wanted and not self.is_written_by_hand(one)}

    def is_written_by_hand(self, tensor: torch.Tensor) -> bool:
        """Whether the user's code writes it once it was used, and a backward pass has begun: no optimizer's update."""
        return self.tape.numbers.of(tensor) in self._by_hand

    def _written_by_hand(self) -> set[int]:
        first = self.course.backwards[0].index if self.course.backwards else 0
        used, written = set[int](), set[int]()
        for op in self.tape.ops:
            if op.in_optimizer or op.in_backward:
                continue
            if op.index >= first:
                written.update(use.memory for use in op.writes if use.memory in used)
            if op.grad_enabled:
                used.update(use.memory for use in op.reads)
        return written
