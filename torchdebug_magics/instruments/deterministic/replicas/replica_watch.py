"""Watches the replicas of a rank, made by DistributedDataParallel or by a loop that averages gradients itself, and the data of each."""

from __future__ import annotations

import contextlib
import functools
import heapq
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import current_process, parent_process
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from torchdebug_magics.instruments.deterministic.replicas.replica import Batch, Digests, Group, Replica, digests_of, group_of, weights_of
from torchdebug_magics.instruments.deterministic.report import ReplicaRecord
from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.probing.dispatch import is_being_compiled, is_being_traced, modes_aside
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import OutermostCalls, live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.probing.state.digest import EMPTY, folded, of_tensor
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.tensors import is_traced, tensors_in
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.ranks.compared import Samples
from torchdebug_magics.ranks.launching import start_method
from torchdebug_magics.report import Location

_MOST_NOTES = 1 << 16
_DIGEST = (1 << 32) - 1
_STEPS_COUNT = 8
_MOST_BATCHES, _MOST_ROWS = 8, 64
"""Batches of the first epoch whose rows are read, and rows of each."""
_MOST_EPOCHS = 8
_SKETCH_COUNT = 32


class ReplicaWatch:
    """Watches one process of a job; with `every`, weights are digested after each step."""

    def __init__(self, guard: Guard, *, every: bool) -> None:
        self._guard = guard
        self._every = every
        self._hooks = Hooks(guard)
        self._data = DataWatch(self._hooks, guard)
        self._calls = OutermostCalls(self._hooks, guard, self._entered, lambda *_: None)
        self._replicas: list[Replica] = []
        self._reduced: dict[int, tuple[StorageWeakRef, Group]] = {}
        """Storages that went through a collective since the last step, by address; the weak reference keeps that from being used again."""
        self._models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        """Those that were called since the last step."""
        self._stepping: int | None = None
        """The outermost optimizer whose step runs."""
        self._made: dict[int, tuple[weakref.ref[torch.nn.Module], Location | None]] = {}
        """The line at which each model got its first part."""
        self._passes_count = 0
        """Forward and backward: what lies between two steps."""
        self._has_worked = False

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        for name in ("all_reduce", "broadcast") if distributed.is_available() else ():
            wrap(stack, self._hooks, distributed, name, self._collective)
        self._data.attach(stack, seedables)
        self._calls.attach(stack, list(live_modules()))
        self._hooks.autograd_calls(stack, "backward", self._backward)
        self._hooks.module_birth(stack, self._born, self._adopted)
        self._hooks.loader_batches(stack, self._drawn)
        self._hooks.optimizer_steps(stack, self._before_step, self._after_step)
        wrap(stack, self._hooks, DistributedDataParallel, "__init__", self._wrapped)

    def sweep(self) -> None:
        """Remove what an interrupt left."""
        self._hooks.sweep(self._calls.modules())

    def record(self) -> ReplicaRecord | None:
        """Return what was recorded; None if nothing ran that is watched."""
        noted = [moment for replica in self._replicas for moment in replica.moments(with_batches=not self._data.is_doubtful)]
        places: dict[Location | None, Location | None] = {}  # an object that several share is pickled once
        moments = tuple(moment._replace(location=places.setdefault(moment.location, moment.location)) for moment, _ in noted)
        details: dict[Any, dict[str, int]] = {}
        for moment, digests in noted:
            details.setdefault((moment.kind, moment.step), {}).update(digests)
        # Where nothing of a model is the rank's own, its batches are, or should be.
        whole = next((replica for replica in self._replicas if not replica.forgotten), None)
        samples = () if whole is None else self._data.samples(whole.of)
        return ReplicaRecord(moments, samples, details) if self._has_worked else None

    # What happens, in the order of a step --------------------------------------------------------------------------------

    def _born(self, module: torch.nn.Module) -> None:
        key = id(module)
        if key not in self._made:
            place = self._guard.run("the look at a new model", line_here)
            self._made[key] = weakref.ref(module, lambda _: self._made.pop(key, None)), place

    def _adopted(self, part: torch.nn.Module) -> None:
        self._made.pop(id(part), None)

    def _wrapped(self, original: Any, wrapper: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        """DistributedDataParallel gives every rank the weights of rank 0."""
        __tracebackhide__ = True
        given = (module,) if module is not None else ()
        model = kwargs.get("module", module)
        before = self._look("the look at a model", lambda: digests_of(weights_of(model))) if isinstance(model, torch.nn.Module) else None
        original(wrapper, *given, *args, **kwargs)
        if before is not None:
            self._look("the look at a replica", lambda: self._add(model, group_of(wrapper.process_group), before, wrapper=wrapper))

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._has_worked = True
        self._passes_count += 1
        trains = module.training and torch.is_grad_enabled()
        self._data.entered(trains=trains)
        if trains:
            self._models[id(module)] = module
            for replica in self._replicas:
                replica.calls(module)
            self._look("the look at a batch", self._data.given, module, (args, kwargs))

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._passes_count += 1
        return original(*args, **kwargs)

    def _drawn(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        batch = original(iterator, *args, **kwargs)
        self._look("the look at a loader", self._data.drawn, iterator, batch)
        return batch

    def _collective(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a collective", self._note_collective, *args, **kwargs)
        return original(*args, **kwargs)

    def _note_collective(self, tensor: torch.Tensor, _op_or_source: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        ranks = group_of(group)
        if len(ranks) > 1 and len(self._reduced) < _MOST_NOTES:
            for storage in storages(tensor):
                self._reduced[storage._cdata] = StorageWeakRef(storage), ranks
                for replica in self._replicas:
                    replica.share(storage._cdata)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._calls.is_ours() and self._stepping in {None, id(optimizer)}:  # the same one, if its last step has raised
            self._stepping = id(optimizer)
            self._look("the look before a step", self._begin, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._calls.is_ours() and self._stepping == id(optimizer):
            self._stepping = None
            self._look("the look after a step", self._end, optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_worked = True
        ids = _ids(optimizer)
        for model in list(self._models.values()):
            if not isinstance(model, DistributedDataParallel) and all(replica.model() is not model for replica in self._replicas):
                self._find(model, ids)
        self._replicas = [replica for replica in self._replicas if not replica.is_local]
        for replica in self._replicas:
            if replica.holds(ids):
                replica.step_begins(ids)
                replica.called = replica.called or self._data.called

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        batch, ids = self._data.stepped(), _ids(optimizer)
        for replica in self._replicas:
            if replica.holds(ids):
                if batch is not None:
                    replica.batches.setdefault(replica.steps_count, batch)
                if replica.stepped(self._passes_count) and replica.step_place is None:
                    replica.step_place = line_here()
        self._reduced.clear()
        self._models.clear()

    # Replicas ------------------------------------------------------------------------------------------------------------

    def _find(self, model: torch.nn.Module, ids: set[int]) -> None:
        """A model most of whose gradients were averaged before its first step, or none beside a replica; of tensor parallelism, some."""
        weights = {name: weight for name, weight in weights_of(model).items() if id(weight) in ids and weight.grad is not None}
        groups = {name: group for name, weight in weights.items() if (group := self._group(weight.grad))}
        # One that is trained beside a replica, by the same optimizer, and not averaged at all: it was forgotten, where it begins alike.
        beside = [] if groups else [replica.group for replica in self._replicas if replica.holds(ids)]
        if not groups and not beside:
            return
        group = beside[0] if beside else Counter(groups.values()).most_common(1)[0][0]
        averaged = {name for name, ranks in groups.items() if ranks == group}
        if groups and 2 * sum(weights[name].numel() for name in averaged) < sum(weight.numel() for weight in weights.values()):
            return
        place = self._made.get(id(model), (None, None))[1]
        self._add(model, group, None, place, names=set(weights), forgotten=weights.keys() - averaged)

    def _group(self, gradient: torch.Tensor | None) -> Group:
        """The ranks of the collective that a gradient went through; empty if there was none."""
        noted = (self._reduced.get(storage._cdata) for storage in storages(gradient)) if gradient is not None else ()
        return next((group for _, group in filter(None, noted)), ())

    def _add(self, model: torch.nn.Module, group: Group, begin: Digests | None, place: Location | None = None, **kind: Any) -> None:
        """Watch a model that begins with these weights, or with those of now; it was made here if not at `place`."""
        if len(group) < 2 or not weights_of(model):  # noqa: PLR2004 - alone
            return
        self._replicas = [replica for replica in self._replicas if replica.model() is not model]
        added = Replica(model, group, every=self._every, place=place or line_here(), **kind)
        added.begins_with(begin)
        if self._replicas:
            name, known = variable_of(model) or type(model).__name__, {replica.label for replica in self._replicas}
            added.label = f"{name}{len(known) + 1}." if f"{name}." in known else f"{name}."
            while any(replica.of == added.of for replica in self._replicas):
                added.of += 1
        self._replicas.append(added)

    def _look(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Nothing of ours is seen by a mode of the user's, or becomes part of a graph."""
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not self._calls.is_ours() or captures or is_being_compiled() or is_being_traced():
            return None
        with modes_aside(), torch.no_grad():
            return self._guard.run(what, call, *args)


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


@dataclass(eq=False)
class _Source:
    """One dataset, drawn at one line."""

    place: Location | None
    dataset: weakref.ref[Any] | None
    dataset_count: int
    replicas_count: int
    replica: int
    seeds: list[int | None] = field(default_factory=list)
    """The seed of each epoch's shuffle; None if the `DistributedSampler` does not shuffle."""
    steps: Counter[int] = field(default_factory=Counter)
    """Optimizer steps by epoch."""
    rows: Counter[int] = field(default_factory=Counter)
    batches_count: int = 0

    def samples(self, of: int, *, with_rows: bool) -> Samples:
        """What ranks compare: seeds of epochs with several training batches, as a loop may draw only the first one at each step; and rows.

        Of their digests the smallest, which share as much with those of another rank as all do; none where this rank sees rows twice.
        """
        with_rows = with_rows and all(count == 1 for count in self.rows.values())
        return Samples(
            of=of, dataset_count=self.dataset_count, replicas_count=self.replicas_count, replica=self.replica,
            seeds=tuple(self.seeds[epoch] for epoch, count in sorted(self.steps.items()) if count > 1)[:_MOST_EPOCHS],
            rows=array("I", heapq.nsmallest(_SKETCH_COUNT, self.rows)).tobytes() if with_rows else b"", location=self.place,
        )  # fmt: skip


class DataWatch:
    """Digests of the inputs of the first 8 steps, and which samples each DataLoader draws: each pass over the data has a sampler iterator.

    The ritual gives all generators the same state on each rank. In a run without it, each process begins with its own, save that a fork has
    its parent's, of torch's and NumPy's. So what may be drawn from those is the user's fault only where the user has seeded them alike.
    """

    def __init__(self, owner: object, guard: Guard) -> None:
        self._owner, self._guard = owner, guard
        self._seeded: list[tuple[Seedable, Any]] = []
        """Generators that only the magic has seeded, with their states right after."""
        self.is_doubtful = False
        """Whether a batch may be the same by the ritual's seed."""
        self._steps_count = 0
        self._digest = EMPTY
        self._drawn_at: Location | None = None
        self.called: Location | None = None
        """The line of the last model call."""
        self._sources: list[_Source] = []
        self._passes: weakref.WeakKeyDictionary[Iterator[Any], tuple[_Source, int]] = weakref.WeakKeyDictionary()
        self._drawn: set[tuple[_Source, int]] = set()
        """(source, epoch) of what was drawn since the last call of a model."""
        self._given: set[tuple[_Source, int]] = set()
        """(source, epoch) of what was drawn for a model in training mode since the last optimizer step."""

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        is_fork = parent_process() is not None and start_method(current_process()) == "fork"
        own = (known for known in seedables if known.name == "random" or (known.seeded in {"entropy", "unknown"} and not is_fork))
        self._seeded = [(known, known.read()) for known in own]
        for name, function in (("torch", "manual_seed"), ("random", "seed"), ("numpy.random", "seed")):
            if (module := sys.modules.get(name)) is not None:
                wrap(stack, self._owner, module, function, functools.partial(self._seed, name))

    def drawn(self, iterator: Any, batch: object) -> None:
        """Note a batch that a DataLoader has returned."""
        self._drawn_at = line_here() if self._steps_count < _STEPS_COUNT else None
        one_pass = getattr(iterator, "_sampler_iter", None)
        if one_pass is None or isinstance(iterator._dataset, torch.utils.data.IterableDataset):
            return
        if one_pass not in self._passes:
            self._passes[one_pass] = self._begin(iterator)
        source, epoch = known = self._passes[one_pass]
        self._drawn.add(known)
        if epoch == 0 and source.batches_count < _MOST_BATCHES:
            source.batches_count += 1
            inputs = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0 and is_varied(tensor)), ())
            source.rows.update(of_tensor(row) & _DIGEST for row in inputs[:_MOST_ROWS] if row.numel() > 1 and is_varied(row))

    def entered(self, *, trains: bool) -> None:
        """Note that a model is called: what was drawn before is its input, and may be validation data."""
        if trains:
            self._given |= self._drawn
        self._drawn.clear()

    def given(self, module: torch.nn.Module, arguments: object) -> None:
        """Note what a model is called with that trains."""
        varied = [tensor for tensor in tensors_in(arguments) if is_varied(tensor)] if self._steps_count < _STEPS_COUNT else []
        for tensor in varied:
            self._digest = folded(self._digest, of_tensor(tensor))
        if varied and next(module.parameters(), None) is not None:
            self.called = line_here() or self.called

    def stepped(self) -> Batch | None:
        """Return the batch of the step that an optimizer has taken; None if it is not one of the first, or had no data."""
        batch = None
        if self._digest != EMPTY:
            self._doubt()
            batch = self._digest & _DIGEST, self._drawn_at or self.called
        for source, epoch in self._given:
            source.steps[epoch] += 1
        self._given.clear()
        self._steps_count += 1
        self._digest, self._drawn_at = EMPTY, None
        return batch

    def samples(self, of: int) -> tuple[Samples, ...]:
        """Return what ranks compare; `of` identifies the model."""
        return tuple(source.samples(of, with_rows=not self.is_doubtful) for source in self._sources if source.steps)

    def _seed(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The user seeds a generator: only what was drawn before may depend on the magic's seed."""
        __tracebackhide__ = True
        if next(iter((*args, *kwargs.values())), None) is not None:
            self._guard.run("the look at a seed", self._doubt, name)
            self._seeded = [(known, state) for known, state in self._seeded if known.name != name]
        return original(*args, **kwargs)

    def _doubt(self, name: str = "") -> None:
        """Become doubtful if one of the generators, or the one of that name, was drawn from."""
        moved = (not same_state(known.read(), state) for known, state in self._seeded if name in {"", known.name})
        self.is_doubtful = self.is_doubtful or any(moved)

    def _begin(self, iterator: Any) -> tuple[_Source, int]:
        sampler = getattr(iterator._index_sampler, "sampler", None)
        is_plain = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
        distributed = sampler if is_plain else None  # a subclass may shuffle otherwise
        dataset, place = iterator._dataset, line_here()
        key = count, replica = (0, 0) if distributed is None else (distributed.num_replicas, distributed.rank)
        alike = (known for known in self._sources if (known.place, known.replicas_count, known.replica) == (place, *key))
        source = next((known for known in alike if (known.dataset if known.dataset is None else known.dataset()) is dataset), None)
        if source is None:
            reference = None
            with contextlib.suppress(TypeError):  # a list or a range
                reference = weakref.ref(dataset)
            length = len(dataset) if hasattr(dataset, "__len__") else 0  # the user's code, once an epoch
            source = _Source(place, reference, length, count, replica)
            self._sources.append(source)
        source.seeds.append(distributed.seed + distributed.epoch if distributed is not None and distributed.shuffle else None)
        return source, len(source.seeds) - 1


def line_here() -> Location | None:
    """The user's line that runs."""
    frame = user_frame(sys._getframe(1))
    return None if frame is None else locate(frame)


def is_varied(tensor: torch.Tensor) -> bool:
    """Whether it can tell one batch from another: data, of which some differ."""
    if is_traced(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() < 2:  # noqa: PLR2004
        return False
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.is_quantized:
        return False
    return not bool((tensor == tensor.flatten()[0]).all())
