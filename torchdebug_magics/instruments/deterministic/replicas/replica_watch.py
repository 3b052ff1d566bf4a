"""Watches the replicas of a rank: made by DistributedDataParallel, or by a loop that averages gradients itself."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.instruments.deterministic.replicas.replica import CollectiveNotes, Group, Replica, digests_of, group_of, weights_of
from torchdebug_magics.instruments.deterministic.replicas.sample_watch import SampleWatch, StepBatches
from torchdebug_magics.instruments.deterministic.report import ReplicaRecord
from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.probing.dispatch import is_being_compiled, is_being_traced
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.modules import OutermostCalls, live_modules
from torchdebug_magics.probing.names import variable_of
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.where import locate, user_frame
from torchdebug_magics.probing.state.digest import number_of
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.report import Location


class ReplicaWatch:
    """Watches one process of a job; with `every`, weights are digested after each step."""

    def __init__(self, guard: Guard, *, every: bool) -> None:
        self._guard = guard
        self._every = every
        self._hooks = Hooks()
        self._notes = CollectiveNotes(self._hooks, guard, self._shared)
        self._batches = StepBatches(self._hooks, guard)
        self._samples = SampleWatch()
        self._calls = OutermostCalls(self._hooks, guard, self._entered, lambda *_: None)
        self._replicas: list[Replica] = []
        self._uses: list[WrapperUse] = []
        """One for each DistributedDataParallel."""
        self._models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        """Those that were called since the last step."""
        self._steps: list[int] = []
        """Optimizers whose step runs, one inside another."""
        self._made: dict[int, tuple[weakref.ref[torch.nn.Module], Location | None]] = {}
        """The line at which each model got its first part."""
        self._passes_count = 0
        """Forward and backward: what lies between two steps."""
        self._has_worked = False

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        self._notes.attach(stack)
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
        known = [one for one in self._replicas if one.is_averaged or not self._notes.sums_count]  # else it may be averaged as a copy
        whole = next((one for one in known if one.is_whole), None)
        samples = () if whole is None else self._samples.samples(whole.of, with_rows=not self._batches.is_doubtful)
        noted = [one for replica in known for one in replica.moments(with_batches=not self._batches.is_doubtful)]
        places: dict[Location | None, Location | None] = {}  # an object that several share is pickled once
        moments = tuple(moment._replace(location=places.setdefault(moment.location, moment.location)) for moment, _ in noted)
        samples = tuple(replace(one, location=places.setdefault(one.location, one.location)) for one in samples)
        details: dict[Any, dict[str, int]] = {}
        for moment, digests in noted:
            details.setdefault((moment.kind, moment.step), {}).update(digests)
        return ReplicaRecord(moments, samples, details) if self._has_worked else None

    # What happens, in the order of a step --------------------------------------------------------------------------------

    def _born(self, module: torch.nn.Module) -> None:
        self._guard.run("the look at a new model", self._note_birth, module)

    def _adopted(self, part: torch.nn.Module) -> None:
        self._made.pop(id(part), None)

    def _note_birth(self, module: torch.nn.Module) -> None:
        key = id(module)
        if key not in self._made:
            self._made[key] = weakref.ref(module, lambda _: self._made.pop(key, None)), _here()

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
        group = group_of(wrapper.process_group)
        replica = self._add(model, group, None, wrapper.parameters_to_ignore, _here())
        if replica is not None:
            replica.initial = {name: digest for name, digest in before.items() if name not in wrapper.parameters_to_ignore}
            replica.wrapper = weakref.ref(wrapper)
            self._uses.append(WrapperUse(wrapper, replica))
            replica.compares_buffers = not wrapper.broadcast_buffers  # else they are rank 0's from the next call on

    def _entered(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._has_worked = True
        self._passes_count += 1
        trains = module.training and torch.is_grad_enabled()
        self._samples.given(trains=trains)
        if trains:
            self._models[id(module)] = module
            for use in self._uses:
                use.called(module)
            if self._batches.is_wanted:
                self._look("the look at a batch", self._batches.given, module, (args, kwargs))

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._passes_count += 1
        return original(*args, **kwargs)

    def _drawn(self, original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        batch = original(iterator, *args, **kwargs)
        if self._calls.is_ours():
            self._guard.run("the look at a loader", self._batches.drawn)
            self._look("the look at a loader's samples", self._samples.drawn, iterator, batch)
        return batch

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._calls.is_ours():
            if id(optimizer) in self._steps:  # that step has raised
                del self._steps[self._steps.index(id(optimizer)) :]
            self._steps.append(id(optimizer))
            if len(self._steps) == 1:
                self._look("the look before a step", self._begin, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._calls.is_ours() and id(optimizer) in self._steps:
            del self._steps[self._steps.index(id(optimizer)) :]
            if not self._steps:
                self._look("the look after a step", self._end, optimizer)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._has_worked = True
        ids = _ids(optimizer)
        for model in list(self._models.values()):
            if not isinstance(model, DistributedDataParallel) and all(one.model() is not model for one in self._replicas):
                self._find(model, ids)
        for model in list(self._models.values()):
            if not isinstance(model, DistributedDataParallel) and all(one.model() is not model for one in self._replicas):
                self._accompany(model, ids)
        self._replicas = [one for one in self._replicas if not one.is_local]
        for use in self._uses:
            use.step_begins(optimizer)
        for replica in self._of(ids):
            if not replica.steps_count:
                replica.begin()
                replica.called = self._batches.called

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        batch = self._batches.step()
        self._samples.stepped()
        for replica in self._of(_ids(optimizer)):
            if batch is not None and replica.is_whole:
                replica.batches.setdefault(replica.steps_count, batch)
            if replica.stepped(self._passes_count) and replica.step_place is None:
                replica.step_place = _here()
        self._batches.forget()
        self._notes.forget()
        self._models.clear()

    # Replicas ------------------------------------------------------------------------------------------------------------

    def _find(self, model: torch.nn.Module, ids: set[int]) -> None:
        """A model whose gradients were averaged, or whose weights were broadcast, before its first step."""
        weights = {name: one for name, one in weights_of(model).items() if id(one) in ids and one.grad is not None}
        averaged = {name: self._notes.group(one.grad) for name, one in weights.items()}
        groups = {name: group for name, one in weights.items() if (group := averaged[name] or self._notes.group(one))}
        if not groups:
            return
        group = Counter(groups.values()).most_common(1)[0][0]
        names = {name for name, where in groups.items() if where == group}
        reduced, whole = (sum(weights[name].numel() for name in some) for some in (names, weights))
        is_whole = 2 * reduced >= whole  # else most of it is each rank's own, as in tensor parallelism
        replica = self._add(model, group, set(weights) if is_whole else names, (), self._made.get(id(model), (None, None))[1] or _here())
        if replica is not None:
            replica.forgotten = frozenset(weights) - names if is_whole else frozenset()
            replica.initial = {name: one for name, one in replica.digests().items() if name not in replica.forgotten}
            replica.is_whole, replica.is_averaged = is_whole, any(averaged.values())

    def _accompany(self, model: torch.nn.Module, ids: set[int]) -> None:
        """A model beside one under DistributedDataParallel, which the same optimizer trains: it was forgotten, where it begins alike."""
        wrapper = next((found for one in self._of(ids) if one.wrapper is not None and (found := one.wrapper()) is not None), None)
        if wrapper is None:
            return
        known = {id(one) for one in wrapper.parameters()}
        names = {name for name, one in weights_of(model).items() if id(one) in ids - known and one.grad is not None}
        replica = self._add(model, group_of(wrapper.process_group), names, (), _here()) if names else None
        if replica is not None:
            replica.is_whole = False
            replica.of = (replica.of ^ number_of(replica.digests().values())) & 0x7FFFFFFF  # each rank's own is compared with no other

    def _add(
        self, model: torch.nn.Module, group: Group, names: set[str] | None, but: Iterable[str], place: Location | None
    ) -> Replica | None:
        if len(group) < 2 or not weights_of(model):  # noqa: PLR2004 - alone
            return None
        self._replicas = [one for one in self._replicas if one.model() is not model]
        replica = Replica(model, group, names=names, but=frozenset(but), every=self._every, place=place)
        if self._replicas:
            replica.label = f"{self._name_of(model)}."
            while any(one.of == replica.of for one in self._replicas):
                replica.of += 1
        self._replicas.append(replica)
        return replica

    def _name_of(self, model: torch.nn.Module) -> str:
        name, kind = variable_of(model), type(model).__name__
        known = {one.label for one in self._replicas}
        return next(one for one in (name, kind, f"{kind}{len(self._replicas) + 1}") if one is not None and f"{one}." not in known)

    def _of(self, ids: set[int]) -> list[Replica]:
        return [one for one in self._replicas if one.holds(ids)]

    def _shared(self, storage: int) -> bool:
        return any(one.share(storage) for one in self._replicas)

    def _look(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Nothing of ours is seen by a mode of the user's, or becomes part of a graph."""
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not self._calls.is_ours() or captures or is_being_compiled() or is_being_traced():
            return None
        with _disable_current_modes(), torch.no_grad():
            return self._guard.run(what, call, *args)


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _here() -> Location | None:
    frame = user_frame(sys._getframe())
    return None if frame is None else locate(frame)


class WrapperUse:
    """Follows one wrapper from step to step, and sets the cause of its replica at the first step at which something is wrong."""

    def __init__(self, wrapper: DistributedDataParallel, replica: Replica) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._replica = replica
        self._averaged = WeakIdKeyDictionary({one: True for one in wrapper.parameters() if one.requires_grad})
        self._is_called = self._is_bypassed = self._is_synced = False

    def called(self, module: torch.nn.Module) -> None:
        """A model is called for training, not by another model."""
        wrapper = self._wrapper()
        if wrapper is module:
            self._is_called = True
            self._is_synced = self._is_synced or bool(wrapper.require_backward_grad_sync)
        elif wrapper is not None and module is wrapper.module:
            self._is_bypassed = True

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are as the optimizer gets them."""
        wrapper = self._wrapper()
        trained = {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
        own = [] if wrapper is None else [one for one in wrapper.parameters() if id(one) in trained]
        if own and self._replica.cause in {"", "averaged"}:
            self._replica.cause = self._cause(is_late=any(one not in self._averaged for one in own))
        if own:
            self._is_called = self._is_bypassed = self._is_synced = False

    def _cause(self, *, is_late: bool) -> str:
        if not self._is_called:
            return "bypassed" if self._is_bypassed else ""
        if not self._is_synced:
            return "unsynced"
        return "late" if is_late else "averaged"
