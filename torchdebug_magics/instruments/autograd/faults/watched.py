"""What is noted at each backward pass, update and zero_grad() of a recorded step, of each parameter, and of writes that no check sees."""

from __future__ import annotations

import ast
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.instruments.autograd.faults.data.leaking_batch import leak
from torchdebug_magics.instruments.autograd.faults.data.seen_at_once import LoaderWatch
from torchdebug_magics.instruments.autograd.faults.derivatives import SecondDerivatives
from torchdebug_magics.instruments.autograd.faults.shared_memory import Taken, restored_finding
from torchdebug_magics.instruments.autograd.graph_recorder import Copied, GraphRecorder
from torchdebug_magics.instruments.autograd.report import AutogradFinding
from torchdebug_magics.instruments.autograd.source_readings import (
    finding,
    named_members,
    root_modules,
    statement_at,
    stepped_name,
    written_names,
)
from torchdebug_magics.instruments.autograd.tape import Backward, EventCourse, OptimizerStep, RecordedOp, StorageNumbers, Use, Zeroed, walk
from torchdebug_magics.probing.dispatch import modes_aside
from torchdebug_magics.probing.graphs import has_packed, leaves_of, saved_by, upstream
from torchdebug_magics.probing.modules import live, live_kinds, live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.edited_source import statements
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.steps import parameters_of
from torchdebug_magics.probing.storages import gathered_for, is_shard, local_of, may_be_gathered, shards_may_be
from torchdebug_magics.report import Location

_MOST_DROPPED = 4
_OF_PREDICTIONS = frozenset({"detach", "argmax", "max", "topk", "isclose", "allclose", "equal"})
"""Ops that read a prediction out of an output, or compare it."""
_MOST_STATES = 64
_Result = TypeVar("_Result")


def _stale(saver: RecordedOp, writer: RecordedOp, members: tuple[str, ...], error_ratio: float | None) -> AutogradFinding:
    """What one op saved, and another one overwrote, with the names of the parameters and buffers that it changes."""
    name = next(iter((*members, *written_names(statement_at(writer.where)))), None)
    source, is_update = writer.source or "the write", writer.in_optimizer or writer.name.startswith("_fused_")
    return finding(
        "stale_value",
        f"{f'`{name}`' if name else 'a tensor'} was overwritten after `{saver.name}` saved it for backward",
        writer.where,
        f"move `{source}` below " + ("the last backward() of the step" if is_update else "backward(), or write into a copy (`.clone()`)"),
        op=saver,
        saved_at=saver.where,
        writer_op=writer.name,
        tensor=name,
        parameters=members,
        error_ratio=error_ratio,
        explanation="PyTorch's version check does not see this write, so backward() used the new values and raised nothing",
    )


def stale_value(recorder: GraphRecorder, tensors: tuple[torch.Tensor, ...]) -> AutogradFinding | None:
    """Of the graph that is about to run backward; None, without a look at it, where no write went unnoticed."""
    tape = recorder.settle()
    # A graph that saved this memory before cannot see the write: no version moved, or that of an alias only.
    writes = ((op, *write) for op in tape.ops if not op.in_backward for write in zip(op.writes, op.moved, strict=False))
    silent = [(op, use) for op, use, moved in writes if use.memory and (moved == use.version or not use.requires_grad)]
    if not silent:
        return None
    nodes = list(upstream(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    for node in nodes:
        saver = None if hasattr(node, "variable") else tape.nodes.of(node._sequence_nr())
        if saver is None:
            continue
        for writer, written in silent:
            if writer.index <= saver.index or not any(use.overlaps(written) for use in (*saver.reads, *saver.makes)):
                continue
            saved, kept = _saved_in(tape.numbers, node, written), recorder.overwritten.get(written.memory)
            if saved is None or kept is None or _is_harmless(node, saved, kept):
                continue  # without the values from before the write nobody knows whether they matter
            ratio = _error(tensors, nodes, saved, kept)
            if ratio != 0.0:
                members = tuple(name for name, tensor in named_members() if tape.numbers.of(tensor) == written.memory)
                return _stale(saver, writer, members, ratio)
    return None


def _saved_in(numbers: StorageNumbers, node: Any, written: Use) -> torch.Tensor | None:
    """The tensor with these elements that the node holds, where PyTorch finds nothing wrong with it."""
    for _, saved in saved_by(node):
        if isinstance(saved, str):
            return None  # modified and noticed, or freed: backward() will raise
        first = saved.storage_offset() * saved.element_size()
        if numbers.of(saved) == written.memory and first < written.span[1] and written.span[0] < first + max(1, saved.nbytes):
            return saved.detach()
    return None


def _is_harmless(node: Any, saved: torch.Tensor, kept: Copied) -> bool:
    """Whether the node gives the same gradients with both values: it may not read all that it saved, as running statistics in training.

    One node can be asked where the whole graph cannot: a call of it runs no hook, and no other node. Its outputs get gradients that differ
    in each element: equal ones would hide much, as what a softmax saved.
    """
    with modes_aside(), torch.no_grad():
        if torch.equal(kept.part(saved.untyped_storage()), kept.values):
            return True
        if isinstance(node, torch.autograd.function.BackwardCFunction) or has_packed(node):
            return False  # it runs code of the user's
        shapes = [(tuple(output.shape), output) for output in node._input_metadata]
        incoming = [torch.arange(math.prod(shape), device=output.device).sin().to(output.dtype).reshape(shape) for shape, output in shapes]
        try:
            now, then = _with_both(saved, kept, lambda: node(*incoming))
        except (RuntimeError, TypeError):
            return False  # it takes other gradients, or there is not the memory for them
        pairs = zip(now, then, strict=True) if isinstance(now, tuple) else ((now, then),)
        return all(gradient is other if gradient is None or other is None else torch.equal(gradient, other) for gradient, other in pairs)


def _with_both(saved: torch.Tensor, kept: Copied, compute: Callable[[], _Result]) -> tuple[_Result, _Result]:
    """With the present values, and with those from before the write, which are there only as long as it takes."""
    place, now = kept.part(saved.untyped_storage()), compute()
    present = place.clone()
    try:
        place.copy_(kept.values)
        return now, compute()
    finally:
        place.copy_(present)


def _error(tensors: tuple[torch.Tensor, ...], nodes: list[Any], saved: torch.Tensor, kept: Copied) -> float | None:
    """The relative error of the gradient: the true one is computed with the values that were saved, on the graph, which is kept."""
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if not leaves or any(tensor.numel() != 1 for tensor in tensors) or _runs_code(nodes, leaves):
        return None
    with modes_aside():
        now, true = _with_both(saved, kept, lambda: torch.autograd.grad(tensors, leaves, retain_graph=True, allow_unused=True))
        pairs = [(gradient, other) for gradient, other in zip(now, true, strict=True) if gradient is not None and other is not None]
        norm = sum(float(other.double().norm()) ** 2 for _, other in pairs) ** 0.5
        error = sum(float((gradient.double() - other.double()).norm()) ** 2 for gradient, other in pairs) ** 0.5
    return error / norm if norm else None


def _runs_code(nodes: list[Any], leaves: list[torch.Tensor]) -> bool:
    """Whether a pass through the graph would run code of the user's: hooks, backwards of functions, checkpoints."""
    return (
        any(bool(getattr(leaf, "_post_accumulate_grad_hooks", None)) for leaf in leaves)
        or any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)
        or any(map(has_packed, nodes))
        or any(tensor._backward_hooks for tensor in live(torch.Tensor) if not tensor.is_leaf or tensor.requires_grad)
    )


class WatchedTraining:
    """Fills the course; keeps no tensor and no optimizer alive."""

    def __init__(self, recorder: GraphRecorder, course: EventCourse, guard: Guard) -> None:
        self.recorder = recorder
        self.course = course
        self.stale: AutogradFinding | None = None
        self.leak: AutogradFinding | None = None
        self.restored: AutogradFinding | None = None
        """A state that was loaded into the parameters whose memory it shares."""
        self._states: list[Taken] = []
        self.moved: set[int] = set()
        """The ids of parameters without `requires_grad` whose gradient was still there at an update."""
        self.steps: Counter[int] = Counter()
        """How often each optimizer was stepped, by its id."""
        self.derivatives = SecondDerivatives(recorder)
        self.loaders = LoaderWatch(guard, recorder.line_here, self.steps.total)
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._dropped: list[tuple[weakref.ref[torch.Tensor], StorageWeakRef]] = []
        """(the owner, the storage) of some gradients that are set to zero just now."""

    def updated(self) -> set[int]:
        """The ids of the tensors that an optimizer has updated in a recorded step."""
        return {key for step in self.course.steps for key in step.parameters}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and are alive."""
        return [optimizer for ref in self._optimizers.values() if (optimizer := ref()) is not None]

    def backward(self, tensors: tuple[torch.Tensor, ...], *, is_loss: bool) -> Backward:
        """A pass begins: what it will reach, and which gradients are there already."""
        recorder, line = self.recorder, self.recorder.line_here()
        if not recorder.is_on:
            return Backward(line)
        tape = recorder.settle()
        recorder.look_at_shared_memory()
        graph = [op for tensor in tensors for op in tape.ancestors(id(tensor), in_graph=True)]
        leaves = frozenset(use.tensor for op in graph for use in op.reads if use.is_leaf and use.requires_grad)
        updated = [tensor for optimizer in self.optimizers() for tensor in parameters_of(optimizer)]
        leaves = _with_shards(leaves, tensors, updated)
        with modes_aside(), torch.no_grad():
            left = frozenset(id(leaf) for leaf in updated or leaves_of(tensors) if id(leaf) in leaves and _is_nonzero(leaf.grad))
        loss = tensors[0] if tensors else None
        if is_loss and self.stale is None:
            self.stale = stale_value(recorder, tensors)
        if is_loss and loss is not None:
            self.leak = self.leak or leak(recorder, loss)
        return Backward(
            line,
            is_recorded=is_loss,
            index=tape.count,
            ops=frozenset(op.index for op in graph),
            leaves=leaves,
            left_over=left,
            loss_is_leaf=loss is not None and loss.is_leaf and loss.requires_grad,
            loss=id(loss),
            node=-1 if loss is None or loss.grad_fn is None else loss.grad_fn._sequence_nr(),
        )

    def step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> OptimizerStep:
        """An update begins: which of its tensors have a gradient; with a closure, that one computes them."""
        if id(optimizer) not in self.steps:
            self.loaders.samples.restart()
        self.steps[id(optimizer)] += 1
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        frozen = (parameter for parameter in parameters_of(optimizer) if not parameter.requires_grad)
        self.moved.update(id(parameter) for parameter in frozen if parameter.grad is not None)
        line = self.recorder.line_here()
        if not self.recorder.is_on or has_closure:
            return OptimizerStep(line, id(optimizer))
        with modes_aside(), torch.no_grad():
            tensors = [tensor for tensor in parameters_of(optimizer) if tensor.requires_grad]
            return OptimizerStep(
                line,
                id(optimizer),
                is_recorded=True,
                name=variable_of(optimizer) or stepped_name(line.location if line is not None else None) or "optimizer",
                parameters=frozenset(map(id, tensors)),
                without=frozenset(id(tensor) for tensor in tensors if tensor.grad is None),
                nonzero=frozenset(id(tensor) for tensor in tensors if _is_nonzero(tensor.grad)),
            )

    def state_taken(self, state: Any) -> None:
        """``state_dict()`` has returned that."""
        if isinstance(state, OrderedDict):  # what a hook of the user's has made of it may bear no weak reference
            alive = [taken for taken in self._states if taken.state() is not None]
            taken = Taken(weakref.ref(state), self.recorder.line_here(), self.steps.total(), self.recorder.settle().count)
            self._states = [*alive[-_MOST_STATES:], taken]

    def state_loaded(self, module: torch.nn.Module, state: Any) -> None:
        """``load_state_dict(state)`` is called: it changes nothing that only an optimizer has written since, and that the state shares."""
        self.loaders.samples.restart()
        taken = next((taken for taken in self._states if taken.state() is state), None)
        if taken is None or taken.line is None or taken.steps_count == self.steps.total():
            return
        tape = self.recorder.settle()
        later = [op for op in tape.since(taken.op_index) if not op.in_optimizer and not op.in_backward]
        written = {use.memory for op in later for use in op.writes}
        updated = {id(tensor) for optimizer in self.optimizers() for tensor in parameters_of(optimizer)}
        moved = {
            name: parameter
            for name, parameter in module.named_parameters()
            if id(parameter) in updated and tape.numbers.of(parameter) not in written
        }
        if moved and all(name in state and memory_of(state[name]) == memory_of(parameter) != 0 for name, parameter in moved.items()):
            line = self.recorder.line_here()
            self.restored = restored_finding(taken.line.location, None if line is None else line.location)

    def zeroed(self, holder: torch.optim.Optimizer | torch.nn.Module) -> Zeroed:
        """``zero_grad()`` is called: whether an op has read one of the gradients since the latest backward pass began."""
        if not self.recorder.is_on:
            return Zeroed(self.recorder.line_here())
        tensors = list(parameters_of(holder) if isinstance(holder, torch.optim.Optimizer) else holder.parameters())
        tape, begun = self.recorder.settle(), self.course.backwards[-1:]
        gradients = {tape.numbers.of(tensor.grad) for tensor in tensors if tensor.grad is not None}
        later = [op for op in tape.since(begun[0].index) if not op.in_backward] if begun else []
        some = [(tensor, tensor.grad) for tensor in tensors[:_MOST_DROPPED] if tensor.grad is not None]
        dense = [(tensor, gradient) for tensor, gradient in some if gradient.layout is torch.strided and not gradient.is_meta]
        self._dropped = [(weakref.ref(tensor), StorageWeakRef(gradient.untyped_storage())) for tensor, gradient in dense]
        is_read = any(use.memory in gradients for op in later for use in op.reads)
        return Zeroed(self.recorder.line_here(), frozenset(map(id, tensors)), is_read=is_read)

    def is_zeroed(self, event: Zeroed) -> None:
        """``zero_grad()`` has ended: a gradient that it dropped, and that is there, is held by someone."""
        are_alive = [not storage.expired() for owner, storage in self._dropped if (tensor := owner()) is not None and tensor.grad is None]
        event.is_read = event.is_read or any(are_alive)
        self._dropped = []


def _with_shards(leaves: frozenset[int], tensors: tuple[torch.Tensor, ...], updated: Iterable[torch.Tensor]) -> frozenset[int]:
    """With the DTensors that the graphs end in, by what FSDP and tensor parallelism do to them on the way: no op is seen to do it."""
    ends = leaves_of(tensors) if shards_may_be() else []
    is_all_updated = set(map(id, updated)).issuperset(map(id, ends))  # then nothing was gathered for it, and no module is looked for
    gathered = gathered_for(live_modules()) if may_be_gathered() and not is_all_updated else {}
    sharded = (gathered.get(id(end), end) for end in ends)
    return leaves - gathered.keys() | {id(tensor) for tensor in sharded if is_shard(tensor)}


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Whether there is one, and it is not all zero; of a DTensor, in this process."""
    if gradient is None or gradient.is_meta:
        return False
    values = gradient._values() if gradient.layout is torch.sparse_coo else local_of(gradient)
    return bool(values.count_nonzero())


class TrainingFacts:
    """What is known of the parameters that are alive. Held only while the recorded steps are judged."""

    def __init__(self, watched: WatchedTraining) -> None:
        alive = live_kinds(torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.nn.Parameter)
        self.watched, self.course, self.tape = watched, watched.course, watched.recorder.tape
        self.roots = root_modules(alive[torch.nn.Module])
        self.scalers: list[torch.amp.GradScaler] = alive[torch.amp.GradScaler]
        self.optimizers = watched.optimizers()
        """Those that have stepped."""
        self.all_optimizers: list[torch.optim.Optimizer] = [
            optimizer for optimizer in alive[torch.optim.Optimizer] if "param_groups" in vars(optimizer)
        ]  # a constructor that raised may leave another
        self.parameters = {id(parameter): parameter for root in self.roots for parameter in root.parameters()}
        """Of models, by their ids."""
        self.loose = {id(parameter): parameter for parameter in alive[torch.nn.Parameter] if id(parameter) not in self.parameters}
        """Parameters that are registered in no module."""
        self.names = {id(tensor): name for name, tensor in reversed(list(named_members(self.roots)))}
        """Of parameters and buffers, as in `state_dict`."""
        self.reached = {key for backward in self.course.backwards for key in backward.leaves}
        """The ids of the tensors that a recorded backward pass has reached."""
        self.updated = watched.updated()
        self.held = self.updated | {id(tensor) for optimizer in self.all_optimizers for tensor in parameters_of(optimizer)}
        """The ids of the tensors that an optimizer has."""
        self._by_hand = self._written_by_hand()

    @cached_property
    def consumers(self) -> dict[int, list[RecordedOp]]:
        """The forward ops that read what an op made, by the index of that op."""
        return {key: [op for op in later if op.is_forward] for key, later in self.tape.consumers().items()}

    @cached_property
    def files(self) -> list[str]:
        """In which ops ran, the latest first."""
        return list(dict.fromkeys(op.line.file for op in reversed(self.tape.ops) if op.line is not None))

    def statements(self) -> Iterator[tuple[Location, ast.stmt]]:
        """The user's, of the latest of these files, then of the cells."""
        return statements(self.files[0]) if self.files else iter(())

    def readers_of(self, tensor: torch.Tensor) -> list[RecordedOp]:
        """The forward ops that read it."""
        memory = self.tape.numbers.of(tensor)
        return [op for op in self.tape.ops if op.is_forward and any(use.memory == memory for use in op.reads)]

    def computed_from(self, readers: Iterable[RecordedOp]) -> dict[int, RecordedOp]:
        """These ops, and forward from them, the nearest first; by index."""
        return {op.index: op for op in walk(readers, lambda op: self.consumers.get(op.index, ()))}

    def inputs_of(self, model: torch.nn.Module) -> set[tuple[int, tuple[int, int]]]:
        """(memory, span) of all that a model was given: of one input that it is given again and again, as for a mean of Dropout, once."""
        own = {self.tape.numbers.of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        ops = [op for op in self.tape.ops if op.root == id(model)]
        inside = {id(use) for op in ops for use, maker in op.sources if maker.root == op.root}
        return {(use.memory, use.span) for op in ops for use in op.reads if use.memory not in own and id(use) not in inside}

    def is_predicted_with(self, root: int) -> bool:
        """Whether the cell trains nothing, and what a model returns is read as a prediction, or compared: without its graph."""
        if self.course.events:
            return False
        own, consumers = [op for op in self.tape.ops if op.root == root], self.tape.consumers()
        later = walk(own, lambda op: consumers.get(op.index, ()))
        return any(op.name in _OF_PREDICTIONS and op.root != root for op in later)

    def steps_of(self, optimizer: torch.optim.Optimizer) -> list[OptimizerStep]:
        """The recorded updates that it made."""
        return [step for step in self.course.steps if step.optimizer == id(optimizer)]

    def called(self, optimizer: torch.optim.Optimizer) -> str:
        """What the user calls it."""
        return next((step.name for step in reversed(self.steps_of(optimizer))), "optimizer")

    def names_of(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Of those that belong to a model."""
        return tuple(self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names)

    def not_updated(self, parameters: Mapping[int, torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
        """Those that get gradients, and that neither an optimizer nor the user's code updates."""
        wanted = self.reached - self.held
        return {key: parameter for key, parameter in parameters.items() if key in wanted and not self.is_written_by_hand(parameter)}

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
