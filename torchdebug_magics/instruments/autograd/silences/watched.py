"""What is noted at each backward pass, update and zero_grad() of a recorded step."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from torchdebug_magics.instruments.autograd.errors.inplace import is_packed, saved_names
from torchdebug_magics.instruments.autograd.graph_recorder import Overwritten, Recorder
from torchdebug_magics.instruments.autograd.named import stepped_name
from torchdebug_magics.instruments.autograd.silences.leaking_batch import BatchLeak
from torchdebug_magics.instruments.autograd.tape import RecordedOp, StorageNumbers, Use
from torchdebug_magics.instruments.autograd.training_course import Backward, Course, Step, Zeroed
from torchdebug_magics.probing.graphs import leaves_of, upstream
from torchdebug_magics.probing.modules import live, live_kinds, live_modules, parts_of, unwrapped
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.storages import gathered_for, is_shard, local_of, shards_may_be

_MOST_DROPPED = 4
_Result = TypeVar("_Result")


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


@dataclass(frozen=True)
class Alive:
    """Held only while the recorded steps are judged."""

    roots: list[torch.nn.Module]
    """The modules that are no part of another one."""
    optimizers: list[torch.optim.Optimizer]
    scalers: list[torch.amp.GradScaler]

    @classmethod
    def now(cls) -> Alive:
        """One pass over all objects."""
        found = live_kinds(torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        made = [one for one in found[torch.optim.Optimizer] if "param_groups" in vars(one)]  # one whose constructor raised may be alive
        return cls(roots_of(found[torch.nn.Module]), made, found[torch.amp.GradScaler])

    def members(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in `state_dict`."""
        for root in self.roots:
            if unwrapped(root) is root:
                yield from root.named_parameters()
                yield from root.named_buffers()

    def names(self, tensors: list[torch.Tensor]) -> tuple[str, ...]:
        """Of those that belong to a model."""
        name_of = {id(held): name for name, held in reversed(list(self.members()))}
        return tuple(name_of[id(one)] for one in tensors if id(one) in name_of)


def roots_of(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that are no part of another one."""
    made = [module for module in modules if "_modules" in getattr(module, "__dict__", ())]
    inner = parts_of(made)
    return [module for module in made if id(module) not in inner]


class StaleValue(NamedTuple):
    """Which op saved it, and which one overwrote it."""

    saver: RecordedOp
    writer: RecordedOp
    name_memory: int
    error_ratio: float | None


def stale_value(recorder: Recorder, tensors: tuple[torch.Tensor, ...]) -> StaleValue | None:
    """Of the graph that is about to run backward; None, without a look at it, where no write went unnoticed."""
    tape = recorder.settle()
    silent = [
        (op, use) for op in tape.ops for use, moved in zip(op.writes, op.moved, strict=False) if use.memory and _is_silent(op, use, moved)
    ]
    if not silent:
        return None
    nodes = list(upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    for node in nodes:
        saver = None if hasattr(node, "variable") else tape.by_node.get(node._sequence_nr())
        if saver is None:
            continue
        for writer, written in silent:
            if writer.index <= saver.index or not any(use.overlaps(written) for use in (*saver.reads, *saver.makes)):
                continue
            held, kept = _saved_in(tape.numbers, node, written), recorder.overwritten.get(written.memory)
            if held is None or kept is None or _is_harmless(node, held, kept):
                continue  # without the values from before the write nobody knows whether they matter
            ratio = _error(tensors, nodes, held, kept)
            if ratio != 0.0:
                return StaleValue(saver, writer, written.memory, ratio)
    return None


def _is_silent(op: RecordedOp, written: Use, moved: int) -> bool:
    """Whether a graph that saved this memory before cannot see the write: no version moved, or that of an alias only."""
    if op.in_backward:
        return False
    return moved == written.version or not written.requires_grad


def _saved_in(numbers: StorageNumbers, node: Any, written: Use) -> torch.Tensor | None:
    """The tensor with these elements that the node holds, where PyTorch finds nothing wrong with it."""
    for name in saved_names(node):
        if is_packed(node, name):
            continue
        try:
            held = getattr(node, name)
        except RuntimeError:
            return None  # modified and noticed, or freed: backward() will raise
        for tensor in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(tensor, torch.Tensor) and numbers.of(tensor) == written.memory:
                first = tensor.storage_offset() * tensor.element_size()
                if first < written.span[1] and written.span[0] < first + max(1, tensor.nbytes):
                    return tensor.detach()
    return None


def _is_harmless(node: Any, held: torch.Tensor, kept: Overwritten) -> bool:
    """Whether the node gives the same gradients with both values: it may not read all that it saved, as running statistics in training.

    One node can be asked where the whole graph cannot: a call of it runs no hook, and no other node.
    """
    with _disable_current_modes(), torch.no_grad():
        if torch.equal(_place(held, kept), kept.before):
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction) or any(is_packed(node, name) for name in saved_names(node)):
            return False  # it runs code of the user's
        try:
            now, then = _with_both(held, kept, lambda: _gradients_of(node))
        except (RuntimeError, TypeError):
            return False  # it takes other gradients, or there is not the memory for them
        pairs = list(zip(now, then, strict=True))
        return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


def _gradients_of(node: Any) -> tuple[Any, ...]:
    """For gradients of its outputs that differ in each element: equal ones would hide much, as what a softmax saved."""
    metadata = node._input_metadata
    incoming = [torch.arange(math.prod(one.shape), device=one.device).sin().to(one.dtype).reshape(tuple(one.shape)) for one in metadata]
    outgoing = node(*incoming)
    return outgoing if isinstance(outgoing, tuple) else (outgoing,)


def _place(held: torch.Tensor, kept: Overwritten) -> torch.Tensor:
    """What was written, as it is now."""
    return torch.empty(0, dtype=kept.before.dtype, device=held.device).set_(held.untyped_storage(), *kept.layout)


def _with_both(held: torch.Tensor, kept: Overwritten, compute: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """With the present values, and with those from before the write, which are there only as long as it takes."""
    place, now = _place(held, kept), compute()
    present = place.clone()
    try:
        place.copy_(kept.before)
        return now, compute()
    finally:
        place.copy_(present)


def _error(tensors: tuple[torch.Tensor, ...], nodes: list[Any], held: torch.Tensor, kept: Overwritten) -> float | None:
    """The relative error of the gradient: the true one is computed with the values that were saved, on the graph, which is kept."""
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if not leaves or any(one.numel() != 1 for one in tensors) or _runs_code(nodes, leaves):
        return None
    with _disable_current_modes():
        now, true = _with_both(held, kept, lambda: torch.autograd.grad(tensors, leaves, retain_graph=True, allow_unused=True))
        pairs = [(one, other) for one, other in zip(now, true, strict=True) if one is not None and other is not None]
        norm = sum(float(other.double().norm()) ** 2 for _, other in pairs) ** 0.5
        error = sum(float((one.double() - other.double()).norm()) ** 2 for one, other in pairs) ** 0.5
    return error / norm if norm else None


def _runs_code(nodes: list[Any], leaves: list[torch.Tensor]) -> bool:
    """Whether a pass through the graph would run code of the user's: hooks, backwards of functions, checkpoints."""
    if any(bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) for leaf in leaves):
        return True
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes):
        return True
    if any(is_packed(node, name) for node in nodes for name in saved_names(node)):
        return True
    return any(one._backward_hooks for one in live(torch.Tensor) if not one.is_leaf or one.requires_grad)
