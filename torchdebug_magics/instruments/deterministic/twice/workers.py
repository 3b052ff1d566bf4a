"""The workers of DataLoaders, run in this process: there, what their datasets ask can be noted and answered."""

from __future__ import annotations

import copy
import multiprocessing.process
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker


def workers_here(stack: ExitStack) -> None:
    """From here until the stack closes. Each loop begins as a worker does: seeded, with `get_worker_info`, after `worker_init_fn`."""
    kind: Any = DataLoader
    ordinary = kind._get_iterator

    def get_iterator(loader: Any) -> Any:
        return _batches(loader, ordinary) if loader.num_workers else ordinary(loader)

    stack.callback(setattr, kind, "_get_iterator", ordinary)
    stack.callback(setattr, worker, "_worker_info", worker._worker_info)
    kind._get_iterator = get_iterator


def _batches(loader: Any, ordinary: Any) -> Iterator[Any]:
    alone = copy.copy(loader)
    alone.multiprocessing_context = None
    alone.num_workers, alone.timeout = 0, 0
    batches = ordinary(alone)
    seed = int(batches._base_seed)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    worker._worker_info = worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=seed, dataset=loader.dataset)
    if loader.worker_init_fn is not None:
        loader.worker_init_fn(0)
    yield from batches


def processes_count() -> str:
    """How many processes were started so far, in words: it changes with each."""
    counter: Any = getattr(multiprocessing.process, "_process_counter", None)
    return repr(counter)
