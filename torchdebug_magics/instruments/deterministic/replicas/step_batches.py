"""Digests the batches of the first steps and notes which samples are drawn, so that ranks that draw the same ones can be found."""

from __future__ import annotations

import contextlib
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
from torchdebug_magics.probing.source.user_code import locate, user_frame
from torchdebug_magics.probing.state.digest import EMPTY, folded, of_tensor
from torchdebug_magics.probing.state.rng import same_state
from torchdebug_magics.probing.tensors import is_traced, tensors_in
from torchdebug_magics.probing.wrappers import wrap
from torchdebug_magics.ranks.compared import Samples
from torchdebug_magics.ranks.launching import start_method
from torchdebug_magics.report import Location

_DIGEST = (1 << 32) - 1
Batch = tuple[int, "Location | None"]
"""Its digest, and where it was drawn, or else where the model was called."""
_STEPS_COUNT = 8
_MOST_BATCHES, _MOST_ROWS = 8, 64
"""Batches of the first epoch whose rows are read, and rows of each."""
_MOST_EPOCHS = 8
_SKETCH_COUNT = 32


class StepBatches:
    """Digests of the inputs of the first 8 steps.

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
        self._drawn: Location | None = None
        self.called: Location | None = None
        """The line of the last model call."""

    def attach(self, stack: ExitStack, seedables: Iterable[Seedable]) -> None:
        """Attach after everything was seeded."""
        is_fork = parent_process() is not None and start_method(current_process()) == "fork"
        own = (known for known in seedables if known.name == "random" or (known.seeded in {"entropy", "unknown"} and not is_fork))
        self._seeded = [(known, known.read()) for known in own]
        for name, function in (("torch", "manual_seed"), ("random", "seed"), ("numpy.random", "seed")):
            if (module := sys.modules.get(name)) is not None:
                wrap(stack, self._owner, module, function, functools.partial(self._seed, name))

    @property
    def is_wanted(self) -> bool:
        """Whether this step is looked at."""
        return self._steps_count < _STEPS_COUNT

    def drawn(self) -> None:
        """A DataLoader gives a batch."""
        self._drawn = line_here() if self.is_wanted else None

    def given(self, module: torch.nn.Module, arguments: object) -> None:
        """A model is called."""
        varied = [tensor for tensor in tensors_in(arguments) if is_varied(tensor)]
        for tensor in varied:
            self._digest = folded(self._digest, of_tensor(tensor))
        if varied and next(module.parameters(), None) is not None:
            self.called = line_here() or self.called

    def stepped(self) -> Batch | None:
        """Return the batch of the step that an optimizer has taken; None if it is not one of the first, or had no data."""
        batch = None
        if self._digest != EMPTY:
            self._doubt()
            batch = self._digest & _DIGEST, self._drawn or self.called
        self._steps_count += 1
        self._digest, self._drawn = EMPTY, None
        return batch

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
            inputs = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0 and is_varied(tensor)), ())
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
        return tuple(source.samples(of, with_rows=with_rows) for source in self._sources if source.steps)

    def _begin(self, iterator: Any) -> tuple[_Source, int]:
        sampler = getattr(iterator._index_sampler, "sampler", None)
        is_plain = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
        distributed = sampler if is_plain else None  # a subclass may shuffle otherwise
        dataset, place = iterator._dataset, line_here()
        key = count, replica = (0, 0) if distributed is None else (distributed.num_replicas, distributed.rank)
        alike = (one for one in self._sources if (one.place, one.replicas_count, one.replica) == (place, *key))
        source = next((one for one in alike if (one.dataset if one.dataset is None else one.dataset()) is dataset), None)
        if source is None:
            reference = None
            with contextlib.suppress(TypeError):  # a list or a range
                reference = weakref.ref(dataset)
            length = len(dataset) if hasattr(dataset, "__len__") else 0  # the user's code, once an epoch
            source = _Source(place, reference, length, count, replica)
            self._sources.append(source)
        source.seeds.append(distributed.seed + distributed.epoch if distributed is not None and distributed.shuffle else None)
        return source, len(source.seeds) - 1
