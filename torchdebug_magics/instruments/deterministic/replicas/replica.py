"""One model of which each rank has a replica: its digests at the start and at checkpoints."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from torchdebug_magics.probing.state.digest import number_of, of_plain, of_tensor
from torchdebug_magics.probing.storages import storages
from torchdebug_magics.ranks.compared import Details, Moment
from torchdebug_magics.ranks.report import RankFindingKind
from torchdebug_magics.report import Location

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""No DTensor, and no flat parameter of FSDP: a rank has its own part of those."""
Digests = dict[str, int]
Batch = tuple[int, "Location | None"]
"""Its digest, and where it was drawn, or else where the model was called."""
_MOST = 256
_LEAST = 16
_MOST_DIGESTS = 1 << 17
Group = tuple[int, ...]
"""Ranks of a process group."""


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are whole on this rank."""
    return {name: weight for name, weight in model.named_parameters() if type(weight) in _PLAIN}


def digests_of(tensors: dict[str, torch.Tensor]) -> Digests:
    """Digest each tensor."""
    return {name: of_tensor(tensor) for name, tensor in tensors.items()}


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint would hold: others are caches, which may differ in length."""
    named = ((path, name, buffer, part) for path, part in model.named_modules() for name, buffer in part._buffers.items())
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, name, buffer, part in named
        if type(buffer) in _PLAIN and buffer is not None and name not in part._non_persistent_buffers_set
    }


class Replica:
    """The replica of one live model; nothing is recorded once the model is gone."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: Group,
        *,
        wrapper: DistributedDataParallel | None = None,
        names: Collection[str] | None = None,
        forgotten: Collection[str] = (),
        every: bool,
        place: Location | None,
    ) -> None:
        self.model = weakref.ref(model)
        self.group = group
        self._wrapper: Callable[[], DistributedDataParallel | None] = (lambda: None) if wrapper is None else weakref.ref(wrapper)
        """The DistributedDataParallel around the model; none if the user's loop averages its gradients."""
        self._is_wrapped = wrapper is not None
        self._names, self._but = names, frozenset() if wrapper is None else frozenset(wrapper.parameters_to_ignore)
        self.forgotten = frozenset(forgotten)
        """Weights that are not averaged while most are: meant to be, where they begin alike, and else each rank's own."""
        self.label = ""
        """Before the names of its tensors, where there are several replicas."""
        self.initial: Digests | None = None
        self.batches: dict[int, Batch] = {}
        self.place = place
        """The line at which it was made."""
        self.called: Location | None = None
        self.step_place: Location | None = None
        self.steps_count = 0
        self._passes_count = -1
        """At its last step."""
        weights = self._weights(model)
        self._noted = Checkpoints(len(weights), every=every)
        self._first_buffers: Digests = {}
        self._last_buffers: Digests = {}
        self._buffer_names: dict[int, str] = {}
        """By storage address."""
        self._shared: set[str] = set()
        """Buffers that the user's own collectives make equal: they may differ between two of these collectives."""
        self._cause = ""
        """Why its gradients are not averaged, or differ after that, as far as its wrapper tells: a slug of `ranks.disagreements`."""
        trained = () if wrapper is None else [weight for weight in wrapper.parameters() if weight.requires_grad]
        self._averaged = WeakIdKeyDictionary(dict.fromkeys(trained, True))
        self._is_called = self._is_bypassed = self._is_synced = False
        kinds = [f"{name} {tuple(weight.shape)} {weight.dtype} {weight.device.type}" for name, weight in weights.items()]
        self.of = of_plain([*map(str, group), *kinds]) & 0x7FFFFFFF

    def holds(self, ids: Collection[int]) -> bool:
        """Whether one of these is a parameter of its model."""
        model = self.model()
        return model is not None and any(id(weight) in ids for weight in model.parameters())

    def share(self, storage: int) -> None:
        """Note that the storage at an address goes through a collective."""
        if storage in self._buffer_names:
            self._shared.add(self._buffer_names[storage])

    def calls(self, module: torch.nn.Module) -> None:
        """A model is called for training, not by another model."""
        wrapper = self._wrapper()
        if wrapper is module:
            self._is_called = True
            self._is_synced = self._is_synced or bool(wrapper.require_backward_grad_sync)
        elif wrapper is not None and module is wrapper.module:
            self._is_bypassed = True

    def step_begins(self, trained: Collection[int]) -> None:
        """The gradients of the parameters with these ids are as the optimizer gets them: what the wrapper did shows the first time."""
        wrapper = self._wrapper()
        own = [] if wrapper is None else [weight for weight in wrapper.parameters() if id(weight) in trained and weight.grad is not None]
        if own and self._cause in {"", "averaged"}:
            if not self._is_called:
                self._cause = "bypassed" if self._is_bypassed else ""
            elif not self._is_synced:
                self._cause = "unsynced"
            else:
                self._cause = "late" if any(weight not in self._averaged for weight in own) else "averaged"
        if own:
            self._is_called = self._is_bypassed = self._is_synced = False
        if not self.steps_count:
            self._note(0)
            self._first_buffers = self._last_buffers

    @property
    def is_local(self) -> bool:
        """Whether its gradients stay on this rank on purpose, and weights are averaged now and then."""
        hooks = getattr(self._wrapper(), "_comm_hooks", ())
        return any("localsgd" in getattr(hook, "__name__", "").lower() for hook, _ in hooks)

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

    def begins_with(self, digests: Digests | None) -> None:
        """Its weights as they were made, which are those of now if they are not given."""
        model = self.model()
        digests = digests_of(self._weights(model)) if digests is None and model is not None else digests or {}
        self.initial = {name: value for name, value in digests.items() if name not in self._but | self.forgotten}

    def moments(self, *, with_batches: bool) -> Iterator[tuple[Moment, Details]]:
        """States that should be equal on the ranks of its group, in order of time."""
        if self.initial is not None:
            yield self._moment("initial_weights", 0, self.initial, self.place)
        if with_batches and len({digest for digest, _ in self.batches.values()}) > 1:  # always the same one is a test's
            for step, (digest, place) in self.batches.items():
                yield Moment("same_batch", step, digest, place, self.of), {}
        begun: int | None = None
        for step, (names, values) in self._noted.held.items():
            weights = dict(zip(names, values, strict=True))
            own = {name: weights.pop(name) for name in names if name in self.forgotten}
            begun = number_of(own.values()) & 0x7FFFFFFF if begun is None else begun
            yield self._moment("replicas_part", step, weights, self.step_place)
            if own:
                yield self._moment("replicas_part", step, own, self.step_place, begun)
        moved = {name: value for name, value in self._last_buffers.items() if self._first_buffers.get(name) != value}
        if moved := {name: value for name, value in moved.items() if name not in self._shared}:
            yield self._moment("buffers_drift", max(self._noted.held, default=0), moved, self.called)

    def _moment(self, kind: RankFindingKind, step: int, digests: Digests, place: Location | None, begun: int = 0) -> tuple[Moment, Details]:
        digest = number_of((of_plain(list(digests)), *digests.values())) & 0xFFFFFFFF
        cause = self._cause if kind == "replicas_part" and step else "own_buffers" if kind == "buffers_drift" and self._is_wrapped else ""
        return Moment(kind, step, digest, place, self.of ^ begun, cause), {self.label + name: value for name, value in digests.items()}

    def _note(self, step: int) -> None:
        model, wrapper = self.model(), self._wrapper()
        if model is None:
            return
        weights = self._weights(model)
        self._noted.note(step, weights, map(of_tensor, weights.values()))
        # Those that the wrapper broadcasts are rank 0's from the next call on.
        buffers = {} if wrapper is not None and wrapper.broadcast_buffers else _buffers_of(model)
        buffers = {name: buffer for name, buffer in buffers.items() if name not in self._but}
        self._buffer_names = {storage._cdata: name for name, buffer in buffers.items() for storage in storages(buffer)}
        self._last_buffers = digests_of(buffers)

    def _weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        chosen, names = weights_of(model), self._names
        return {name: weight for name, weight in chosen.items() if name not in self._but and (names is None or name in names)}


class Checkpoints:
    """Values recorded at checkpoints: the first eight steps, then each time the step count has grown by a quarter; or every step."""

    def __init__(self, tensors_count: int, *, every: bool) -> None:
        self.held: dict[int, tuple[tuple[str, ...], array[int]]] = {}
        """By step, the names of the weights and their digests."""
        self._most = max(_LEAST, min(_MOST, _MOST_DIGESTS // max(1, tensors_count)))
        self._every = every
        self._spacing = 1
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether this step is to be noted."""
        return step >= self._next

    def note(self, step: int, names: Iterable[str], digests: Iterable[int]) -> None:
        """Record the weights at a due step; when there is no more room, drop every second value of the later half."""
        self.held[step] = tuple(names), array("Q", digests)
        if len(self.held) >= self._most:
            steps, half = list(self.held), len(self.held) // 2
            self.held = {kept: self.held[kept] for kept in (*steps[:half], *steps[half::2])}
            self._spacing *= 2
        self._next = step + self._spacing * (1 if self._every else max(1, step // 4))


def group_of(group: Any) -> Group:
    """Ranks of a process group, or of the whole job where it is None; empty outside of it."""
    try:
        return tuple(distributed.get_process_group_ranks(group or distributed.group.WORLD))
    except (AttributeError, KeyError, ValueError):
        return ()
