"""Notes which samples the DataLoaders of a rank draw for training, so that ranks that draw the same ones can be found."""

from __future__ import annotations

import heapq
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from torchdebug_magics.instruments.deterministic.replicas.step_batches import is_varied, line_here
from torchdebug_magics.probing.state.digest import of_tensor
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.ranks.compared import Samples
from torchdebug_magics.report import Location

_MOST_BATCHES, _MOST_ROWS = 8, 64
"""Batches of the first epoch whose rows are read, and rows of each."""
_MOST_EPOCHS = 8
_SKETCH_COUNT = 32
_DIGEST = (1 << 32) - 1


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
        return tuple(
            Samples(
                of=of, dataset_count=source.dataset_count, replicas_count=source.replicas_count, replica=source.replica,
                seeds=source.seeds_of_epochs(),
                rows=_sketch(source.rows) if with_rows else b"", location=source.place,
            )
            for source in self._sources if source.steps
        )  # fmt: skip

    def _begin(self, iterator: Any) -> tuple[_Source, int]:
        sampler = getattr(iterator._index_sampler, "sampler", None)
        is_plain = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
        distributed = sampler if is_plain else None  # a subclass may shuffle otherwise
        place = line_here()
        dataset = iterator._dataset
        source = next((source for source in self._sources if source.is_of(dataset, place, distributed)), None)
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
