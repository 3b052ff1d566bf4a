"""Notes which samples the DataLoaders of a rank draw for training, so that ranks that draw the same ones can be found."""

from __future__ import annotations

import functools
import heapq
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import current_process, parent_process
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from torchdebug_magics.instruments.deterministic.ritual.status import Seedable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.where import locate, user_frame
from torchdebug_magics.probing.state.digest import EMPTY, folded, of_tensor
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.probing.tensors import is_traced, tensors_in
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.ranks.compared import Samples
from torchdebug_magics.ranks.launching import start_method
from torchdebug_magics.report import Location

_MOST_BATCHES, _MOST_ROWS = 8, 64
"""Batches of the first epoch whose rows are read, and rows of each."""
_MOST_EPOCHS = 8
_SKETCH_COUNT = 32
_DIGEST = (1 << 32) - 1
Batch = tuple[int, "Location | None"]
"""Its digest, and where it was drawn, or else where the model was called."""
_FIRST, _LAST, _EVERY = 8, 64, 8


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

    def is_of(self, dataset: object, place: Location | None, sampler: DistributedSampler[Any] | None) -> bool:
        held = self.dataset() if self.dataset is not None else None
        replica = (0, 0) if sampler is None else (sampler.num_replicas, sampler.rank)
        return held is dataset and self.place == place and replica == (self.replicas_count, self.replica)

    def seeds_of_epochs(self) -> tuple[int | None, ...]:
        """Seeds of epochs with several training batches; a loop that draws only the first batch at each step has one pass per step."""
        return tuple(self.seeds[epoch] for epoch, count in sorted(self.steps.items()) if count > 1)[:_MOST_EPOCHS]


class SampleWatch:
    """Follows every DataLoader by its passes over the dataset: each pass has a sampler iterator of its own."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []
        self._passes: weakref.WeakKeyDictionary[Iterator[Any], tuple[_Source, int]] = weakref.WeakKeyDictionary()
        self._drawn: set[tuple[_Source, int]] = set()
        """(source, epoch) of what was drawn since the last call of a model."""
        self._given: set[tuple[_Source, int]] = set()
        """(source, epoch) of what was drawn for a model in training mode since the last optimizer step."""

    def drawn(self, iterator: Any, batch: object) -> None:
        """Note a batch that a DataLoader has returned."""
        one_pass = getattr(iterator, "_sampler_iter", None)
        if one_pass is None or isinstance(iterator._dataset, torch.utils.data.IterableDataset):
            return
        known = self._passes.get(one_pass)
        if known is None:
            known = self._passes[one_pass] = self._begin(iterator)
        source, epoch = known
        self._drawn.add(known)
        if epoch == 0 and source.batches_count < _MOST_BATCHES:
            source.batches_count += 1
            inputs = next((one for one in tensors_in(batch) if one.dim() > 0 and is_varied(one)), ())
            source.rows.update(of_tensor(row) & _DIGEST for row in inputs[:_MOST_ROWS] if row.numel() > 1 and is_varied(row))

    def given(self, *, trains: bool) -> None:
        """Note that a model is called: what was drawn before is its input, and may be validation data."""
        if trains:
            self._given |= self._drawn
        self._drawn.clear()

    def stepped(self) -> None:
        """Note that an optimizer has taken a step."""
        for source, epoch in self._given:
            source.steps[epoch] += 1
        self._given.clear()

    def samples(self, of: int, *, with_rows: bool) -> tuple[Samples, ...]:
        """Return what ranks compare; `of` identifies the model, and `with_rows` is false if equal rows prove nothing."""
        return tuple(
            Samples(
                of=of, dataset_count=one.dataset_count, replicas_count=one.replicas_count, replica=one.replica,
                seeds=one.seeds_of_epochs(),
                rows=_sketch(one.rows) if with_rows else b"", location=one.place,
            )
            for one in self._sources if one.steps
        )  # fmt: skip

    def _begin(self, iterator: Any) -> tuple[_Source, int]:
        sampler = getattr(iterator._index_sampler, "sampler", None)
        is_plain = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
        distributed = sampler if is_plain else None  # a subclass may shuffle otherwise
        frame = user_frame(sys._getframe())
        place = None if frame is None else locate(frame)
        dataset = iterator._dataset
        source = next((one for one in self._sources if one.is_of(dataset, place, distributed)), None)
        if source is None:
            count, replica = (0, 0) if distributed is None else (distributed.num_replicas, distributed.rank)
            source = _Source(place, _reference(dataset), _length(dataset), count, replica)
            self._sources.append(source)
        source.seeds.append(distributed.seed + distributed.epoch if distributed is not None and distributed.shuffle else None)
        return source, len(source.seeds) - 1


def _sketch(rows: Counter[int]) -> bytes:
    """The smallest digests: those of two ranks share as much as the rows themselves do. Empty where a rank sees rows twice itself."""
    is_distinct = all(count == 1 for count in rows.values())
    return array("I", heapq.nsmallest(_SKETCH_COUNT, rows)).tobytes() if is_distinct else b""


def _reference(dataset: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list or a range
        return None


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(dataset, "__len__") else 0  # the user's code, once an epoch


class StepBatches:
    """Digests of the inputs of the first 8 steps, then of every 8th until the 64th.

    The ritual gives all generators the same state on each rank. In a run without it, each process begins with its own, save that a fork has
    its parent's, of torch's and NumPy's. So what may be drawn from those is the user's fault only where the user has seeded them alike.
    """

    def __init__(self, owner: object, guard: Guard) -> None:
        self._owner = owner
        self._guard = guard
        self._seeded: list[tuple[Seedable, Any]] = []
        """Generators that only the magic has seeded, with their states right after."""
        self.is_doubtful = False
        """Whether a batch may be the same by the ritual's seed."""
        self._steps_count = 0
        self._digest = EMPTY
        self._drawn: Location | None = None
        self.called: Location | None = None
        """The line of the last model call."""

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        is_fork = parent_process() is not None and start_method(current_process()) == "fork"
        self._seeded = [
            (one, one.read()) for one in seedables if one.name == "random" or (one.seeded in {"entropy", "unknown"} and not is_fork)
        ]
        for name, function in (("torch", "manual_seed"), ("random", "seed"), ("numpy.random", "seed")):
            if (module := sys.modules.get(name)) is not None:
                wrap(stack, self._owner, module, function, functools.partial(self._seed, name))

    @property
    def is_wanted(self) -> bool:
        """Whether this step is looked at."""
        return self._steps_count < _FIRST or (self._steps_count < _LAST and self._steps_count % _EVERY == 0)

    def drawn(self) -> None:
        """A DataLoader gives a batch."""
        frame = user_frame(sys._getframe()) if self.is_wanted else None
        self._drawn = None if frame is None else locate(frame)

    def given(self, module: torch.nn.Module, arguments: object) -> None:
        """A model is called."""
        varied = [one for one in tensors_in(arguments) if is_varied(one)]
        for one in varied:
            self._digest = folded(self._digest, of_tensor(one))
        frame = user_frame(sys._getframe()) if varied else None
        if frame is not None and next(module.parameters(), None) is not None:
            self.called = locate(frame)

    def step(self) -> Batch | None:
        """Return the batch of the current step; None if the step is not one of those, or had no data."""
        if self._digest == EMPTY:
            return None
        self._doubt()
        return self._digest & _DIGEST, self._drawn or self.called

    def forget(self) -> None:
        """That step is over."""
        self._steps_count += 1
        self._digest, self._drawn = EMPTY, None

    def _seed(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._guard.run("the look at a seed", self._seeded_by_user, name, args or tuple(kwargs.values()))
        return original(*args, **kwargs)

    def _seeded_by_user(self, name: str, given: tuple[Any, ...]) -> None:
        """Note that the user has seeded a generator: only what was drawn before may depend on the magic's seed."""
        if given and given[0] is not None:
            self._doubt(name)
            self._seeded = [(one, state) for one, state in self._seeded if one.name != name]

    def _doubt(self, name: str = "") -> None:
        """Become doubtful if one of the generators, or the one of that name, was drawn from."""
        moved = (not same_state(one.read(), state) for one, state in self._seeded if name in {"", one.name})
        self.is_doubtful = self.is_doubtful or any(moved)


def is_varied(tensor: torch.Tensor) -> bool:
    """Whether it can tell one batch from another: data, of which some differ."""
    if is_traced(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() < 2:  # noqa: PLR2004
        return False
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.is_quantized:
        return False
    return not bool((tensor == tensor.flatten()[0]).all())
