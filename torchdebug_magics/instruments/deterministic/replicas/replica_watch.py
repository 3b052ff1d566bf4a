"""Watches the replicas of a rank: made by DistributedDataParallel, or by a loop that averages gradients itself."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from torchdebug_magics.instruments.deterministic.replicas.replica import Group, Replica, digests_of, group_of, weights_of
from torchdebug_magics.instruments.deterministic.replicas.step_batches import SampleWatch, StepBatches, line_here
from torchdebug_magics.instruments.deterministic.report import ReplicaRecord
from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.probing.dispatch import is_being_compiled, is_being_traced, modes_aside
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import OutermostCalls, live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.report import Location

_MOST_NOTES = 1 << 16


class ReplicaWatch:
    """Watches one process of a job; with `every`, weights are digested after each step."""

    def __init__(self, guard: Guard, *, every: bool) -> None:
        self._guard = guard
        self._every = every
        self._hooks = Hooks(guard)
        self._batches = StepBatches(self._hooks, guard)
        self._samples = SampleWatch()
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
        self._batches.attach(stack, seedables)
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
        noted = [moment for replica in self._replicas for moment in replica.moments(with_batches=not self._batches.is_doubtful)]
        places: dict[Location | None, Location | None] = {}  # an object that several share is pickled once
        moments = tuple(moment._replace(location=places.setdefault(moment.location, moment.location)) for moment, _ in noted)
        details: dict[Any, dict[str, int]] = {}
        for moment, digests in noted:
            details.setdefault((moment.kind, moment.step), {}).update(digests)
        # Where nothing of a model is the rank's own, its batches are, or should be.
        whole = next((replica for replica in self._replicas if not replica.forgotten), None)
        samples = () if whole is None else self._samples.samples(whole.of, with_rows=not self._batches.is_doubtful)
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
            self._look("the look at a replica", self._replicate, wrapper, model, before)

    def _replicate(self, wrapper: Any, model: torch.nn.Module, before: dict[str, int]) -> None:
        if (replica := self._add(model, group_of(wrapper.process_group), line_here(), wrapper=wrapper)) is not None:
            replica.begins_with(before)

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._has_worked = True
        self._passes_count += 1
        trains = module.training and torch.is_grad_enabled()
        self._samples.given(trains=trains)
        if trains:
            self._models[id(module)] = module
            for replica in self._replicas:
                replica.calls(module)
            if self._batches.is_wanted:
                self._look("the look at a batch", self._batches.given, module, (args, kwargs))

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._passes_count += 1
        return original(*args, **kwargs)

    def _drawn(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        batch = original(iterator, *args, **kwargs)
        self._look("the look at a loader", self._batches.drawn)
        self._look("the look at a loader's samples", self._samples.drawn, iterator, batch)
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
                replica.called = replica.called or self._batches.called

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        batch, ids = self._batches.stepped(), _ids(optimizer)
        self._samples.stepped()
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
        place = self._made.get(id(model), (None, None))[1] or line_here()
        if (replica := self._add(model, group, place, names=set(weights), forgotten=weights.keys() - averaged)) is not None:
            replica.begins_with()

    def _group(self, gradient: torch.Tensor | None) -> Group:
        """The ranks of the collective that a gradient went through; empty if there was none."""
        noted = (self._reduced.get(storage._cdata) for storage in storages(gradient)) if gradient is not None else ()
        return next((group for _, group in filter(None, noted)), ())

    def _add(self, model: torch.nn.Module, group: Group, place: Location | None, **kind: Any) -> Replica | None:
        if len(group) < 2 or not weights_of(model):  # noqa: PLR2004 - alone
            return None
        self._replicas = [replica for replica in self._replicas if replica.model() is not model]
        added = Replica(model, group, every=self._every, place=place, **kind)
        if self._replicas:
            name, known = variable_of(model) or type(model).__name__, {replica.label for replica in self._replicas}
            added.label = f"{name}{len(known) + 1}." if f"{name}." in known else f"{name}."
            while any(replica.of == added.of for replica in self._replicas):
                added.of += 1
        self._replicas.append(added)
        return added

    def _look(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Nothing of ours is seen by a mode of the user's, or becomes part of a graph."""
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not self._calls.is_ours() or captures or is_being_compiled() or is_being_traced():
            return None
        with modes_aside(), torch.no_grad():
            return self._guard.run(what, call, *args)


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}
