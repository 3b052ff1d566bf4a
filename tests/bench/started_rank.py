"""One launch for ``tests.bench.ranks``: ``started_rank.py nanhunt``. A file of its own, as the process that is spawned imports it."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import multiprocessing


def main(kind: str) -> None:
    session: AbstractContextManager[object] = nullcontext()
    if kind != "plain":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from torchdebug_magics import catalog

        session = catalog.instrument(kind).session()
    with session:
        began = time.perf_counter()
        multiprocessing.spawn(nothing, nprocs=1)  # type: ignore[attr-defined]
        wall_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "mb": used.ru_maxrss / 1000}))


def nothing(_rank: int) -> None:
    """What a rank does that only starts."""
    torch.ones(1)


if __name__ == "__main__":
    main(sys.argv[1])
