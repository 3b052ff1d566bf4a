"""The samples that a worker process was given: one more worker reads them, so that nothing of the user's changes in this one."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from torchdebug_magics.probing.rng import RandomState

__all__ = ["from_worker"]

_MOST_BATCHES = 64
"""That a worker of ours is asked for."""
_LONGEST_S = 5
"""How long it may take."""


def from_worker(loading: Any) -> Iterator[tuple[list[Any], list[int] | None]]:
    """Batches of samples as they are before they are put together, with their indices, from a process of their own as the user's were.

    They begin with the batch that failed, where the samples are read in order, and else with the first.
    """
    dataset, sampler = loading._dataset, loading._index_sampler
    many = getattr(sampler, "batch_size", None)
    if not isinstance(many, int):
        return
    options: dict[str, Any] = {"batch_size": many}
    batches: list[list[int]] = []
    if not isinstance(dataset, IterableDataset):
        in_order = isinstance(sampler, BatchSampler) and isinstance(sampler.sampler, SequentialSampler)
        first = max(loading._rcvd_idx - 1, 0) * many if in_order else 0
        last = min(len(dataset), first + _MOST_BATCHES * many)
        batches = [list(range(at, min(at + many, last))) for at in range(first, last, many)]
        options = {"batch_sampler": batches}
    until = time.monotonic() + _LONGEST_S
    before = RandomState.take()
    try:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=1,
            collate_fn=pickle.dumps,
            timeout=_LONGEST_S,
            worker_init_fn=loading._worker_init_fn,
            multiprocessing_context=loading._workers[0]._start_method,
            **options,
        )
        for number, packed in enumerate(loader):
            yield pickle.loads(packed), batches[number] if batches else None  # noqa: S301 - what our own worker has packed
            if number >= _MOST_BATCHES or time.monotonic() > until:
                return
    except Exception:  # noqa: BLE001 - whatever a data set, or a process that dies, raises: then its key is not known
        return
    finally:
        before.put_back()
