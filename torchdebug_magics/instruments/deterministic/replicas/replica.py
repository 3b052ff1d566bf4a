"""One model of which each rank has a replica: its digests at the start and at checkpoints."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

from torchdebug_magics.instruments.deterministic.replicas.sample_watch import Batch
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.digest import number_of, of_plain, of_tensor
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.ranks.compared import Details, Moment
from torchdebug_magics.ranks.report import RankFindingKind
from torchdebug_magics.report import Location

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""No DTensor, and no flat parameter of FSDP: a rank has its own part of those."""
Digests = dict[str, int]
_MOST = 256
_LEAST = 16
_MOST_DIGESTS = 1 << 17
T = TypeVar("T")
Group = tuple[int, ...]
"""Ranks of a process group."""
_MOST_NOTES = 1 << 16


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are whole on this rank."""
    return {name: one for name, one in model.named_parameters() if type(one) in _PLAIN}


def digests_of(tensors: dict[str, torch.Tensor]) -> Digests:
    """Digest each tensor."""
    return {name: of_tensor(one) for name, one in tensors.items()}


def _buffers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint would hold: others are caches, which may differ in length."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if type(buffer) in _PLAIN and buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


class Replica:
    """The replica of one live model; nothing is recorded once the model is gone."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        *,
        names: Collection[str] | None,
        but: Collection[str],
        every: bool,
        place: Location | None,
    ) -> None:
        weights = self._chosen(weights_of(model), names, but)
        self.model = weakref.ref(model)
        self.wrapper: weakref.ref[Any] | None = None
        """The DistributedDataParallel around the model."""
        self.label = ""
        """Before the names of its tensors, where there are several replicas."""
        self.compares_buffers = True
        self.is_whole = True
        """Whether nothing of the model is the rank's own: then its batches are, or should be."""
        self.is_averaged = True
        """Whether its gradients are known to be; else its weights were broadcast, and no more."""
        self.forgotten: frozenset[str] = frozenset()
        """Weights that are not averaged while most are: meant to be, where they begin alike, and else each rank's own."""
        self.initial: Digests | None = None
        self.batches: dict[int, Batch] = {}
        self.cause = ""
        """Why its gradients are not averaged, or differ after that, as far as its wrapper tells; see `FIXES`."""
        self.place = place
        """The line at which it was made."""
        self.called: Location | None = None
        self.step_place: Location | None = None
        self._names, self._but = names, but
        self.steps_count = 0
        self._passes_count = -1
        """At its last step."""
        self._noted: Checkpoints[tuple[tuple[str, ...], array[int]]] = Checkpoints(len(weights), every=every)
        self._first_buffers: Digests = {}
        self._last_buffers: Digests = {}
        self._names_of: dict[int, str] = {}
        """Tensor names by storage address."""
        self._shared: set[str] = set()
        """Tensors that the user's own collectives make equal: they may differ between two of these collectives."""
        kinds = [f"{name} {tuple(one.shape)} {one.dtype} {one.device.type}" for name, one in weights.items()]
        self.of = of_plain([*map(str, group), *kinds]) & 0x7FFFFFFF

    @property
    def is_local(self) -> bool:
        """Whether its gradients stay on this rank on purpose, and weights are averaged now and then."""
        hooks = getattr(self.wrapper() if self.wrapper is not None else None, "_comm_hooks", ())
        return any("localsgd" in getattr(hook, "__name__", "").lower() for hook, _ in hooks)

    def holds(self, ids: Collection[int]) -> bool:
        """Whether one of these is a parameter of its model."""
        model = self.model()
        return model is not None and any(id(one) in ids for one in model.parameters())

    def share(self, storage: int) -> bool:
        """Note that a tensor of its model goes through a collective, if this is the storage of one."""
        if storage in self._names_of:
            self._shared.add(self._names_of[storage])
        return storage in self._names_of

    def begin(self) -> None:
        """Its first step begins."""
        self._note(0)
        self._first_buffers = self._last_buffers

    def stepped(self, passes_count: int) -> bool:
        """An optimizer has taken a step, after so many passes; whether that is one to be noted."""
        if passes_count == self._passes_count:
            return False  # several optimizers share the weights
        self._passes_count = passes_count
        self.steps_count += 1
        is_due = self._noted.is_due(self.steps_count)
        if is_due:
            self._note(self.steps_count)
        return is_due

    def digests(self) -> Digests:
        """Digest its weights now."""
        model = self.model()
        return {} if model is None else digests_of(self._weights(model))

    def moments(self, *, with_batches: bool) -> Iterator[tuple[Moment, Details]]:
        """States that should be equal on the ranks of its group, in order of time."""
        if self.initial is not None:
            yield self._moment("initial_weights", 0, self.initial, self.place)
        if with_batches and len({digest for digest, _ in self.batches.values()}) > 1:  # always the same one is a test's
            for step, (digest, place) in self.batches.items():
                yield Moment("same_batch", step, digest, place, self.of), {}
        first = dict(zip(*self._noted.held[0], strict=True)) if self._noted.held else {}
        begun = number_of(first.get(name, 0) for name in sorted(self.forgotten)) & 0x7FFFFFFF
        for step, (names, values) in self._noted.held.items():
            weights = self._but_for(dict(zip(names, values, strict=True)), self._shared)
            yield self._moment("replicas_part", step, self._but_for(weights, self.forgotten), self.step_place)
            if self.forgotten:
                yield self._moment("replicas_part", step, self._but_for(weights, weights.keys() - self.forgotten), self.step_place, begun)
        moved = {name: value for name, value in self._last_buffers.items() if self._first_buffers.get(name) != value}
        moved = self._but_for(moved, self._shared)
        if moved:
            yield self._moment("buffers_drift", max(self._noted.held, default=0), moved, self.called)

    @staticmethod
    def _but_for(digests: Digests, names: Collection[str]) -> Digests:
        return {name: value for name, value in digests.items() if name not in names}

    def _moment(self, kind: RankFindingKind, step: int, digests: Digests, place: Location | None, begun: int = 0) -> tuple[Moment, Details]:
        digest = number_of((of_plain(list(digests)), *digests.values())) & 0xFFFFFFFF
        cause = self.cause if kind == "replicas_part" and step else "own_buffers" if kind == "buffers_drift" and self.wrapper else ""
        return Moment(kind, step, digest, place, self.of ^ begun, cause), {self.label + name: value for name, value in digests.items()}

    def _note(self, step: int) -> None:
        model = self.model()
        if model is None:
            return
        weights = self._weights(model)
        buffers = {name: one for name, one in _buffers_of(model) if name not in self._but} if self.compares_buffers else {}
        named = {**weights, **buffers}
        self._names_of = {storage._cdata: name for name, one in named.items() for storage in storages(one)}
        self._noted.note(step, (tuple(weights), array("Q", map(of_tensor, weights.values()))))
        self._last_buffers = digests_of(buffers)

    def _weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return self._chosen(weights_of(model), self._names, self._but)

    @staticmethod
    def _chosen(weights: dict[str, torch.Tensor], names: Collection[str] | None, but: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: one for name, one in weights.items() if name not in but and (names is None or name in names)}


class Checkpoints(Generic[T]):
    """Values recorded at checkpoints: the first eight steps, then each time the step count has grown by a quarter; or every step."""

    def __init__(self, tensors_count: int, *, every: bool) -> None:
        self.held: dict[int, T] = {}
        self._most = max(_LEAST, min(_MOST, _MOST_DIGESTS // max(1, tensors_count)))
        self._every = every
        self._spacing = 1
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether this step is to be noted."""
        return step >= self._next

    def note(self, step: int, value: T) -> None:
        """Record the value of a due step; when there is no more room, drop every second value of the later half."""
        self.held[step] = value
        if len(self.held) >= self._most:
            steps, half = list(self.held), len(self.held) // 2
            self.held = {one: self.held[one] for one in (*steps[:half], *steps[half::2])}
            self._spacing *= 2
        self._next = step + self._spacing * (1 if self._every else max(1, step // 4))


def group_of(group: Any) -> Group:
    """Ranks of a process group, or of the whole job where it is None; empty outside of it."""
    try:
        return tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))
    except (AttributeError, KeyError, ValueError):
        return ()


class CollectiveNotes:
    """Tensors that were reduced or broadcast since the last optimizer step."""

    def __init__(self, owner: object, guard: Guard, shared: Callable[[int], bool]) -> None:
        self._owner = owner
        self._guard = guard
        self._shared = shared
        """Told of each storage; whether it belongs to a replica that is known."""
        self._storages: dict[int, tuple[StorageWeakRef, Group]] = {}
        """By storage address; the weak reference keeps the address from being used again."""

        self.sums_count = 0
        """Reduced tensors of several elements that do not belong to a replica."""

    def attach(self, stack: ExitStack) -> None:
        """Record collectives until the stack closes."""
        if distributed.is_available():
            wrap(stack, self._owner, distributed, "all_reduce", functools.partial(self._around, 1))
            wrap(stack, self._owner, distributed, "broadcast", functools.partial(self._around, 0))

    def forget(self) -> None:
        """Forget the collectives of a finished step."""
        self._storages.clear()

    def group(self, tensor: torch.Tensor | None) -> Group:
        """The ranks of the collective that a tensor went through; empty if there was none."""
        noted = (self._storages.get(one._cdata) for one in storages(tensor)) if tensor is not None else ()
        return next((group for _, group in filter(None, noted)), ())

    def _around(self, sums: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a collective", self._note, sums, *args, **kwargs)
        return original(*args, **kwargs)

    def _note(self, sums: int, tensor: torch.Tensor, _op_or_source: Any = None, group: Any = None, *_: Any, **__: Any) -> None:
        ranks = group_of(group)
        if len(ranks) > 1 and len(self._storages) < _MOST_NOTES:
            for one in storages(tensor):
                if not self._shared(one._cdata):
                    self.sums_count += sums * (tensor.numel() > 1)
                    self._storages[one._cdata] = StorageWeakRef(one), ranks
