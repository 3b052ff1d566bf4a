"""Which process of a distributed job runs here, found out without beginning one."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank() -> int | None:
    """The rank as torch knows it, or as the launcher says; None outside a job."""
    group = job()
    return _number("RANK") if group is None else int(group.get_rank())


def world_size() -> int:
    """How many processes the job has."""
    group = job()
    return _number("WORLD_SIZE") or 1 if group is None else int(group.get_world_size())


def launched_as() -> tuple[int, int]:
    """(rank, number of ranks) as the launcher says, whatever the program makes of it; (0, 1) where there is none."""
    return _number("RANK") or 0, _number("WORLD_SIZE") or 1


def device() -> str:
    """The accelerator that this process uses, such as ``"cuda:1"``; ``"cpu"`` where it has begun none."""
    cuda: Any = sys.modules.get("torch.cuda")
    return f"cuda:{cuda.current_device()}" if cuda is not None and cuda.is_initialized() else "cpu"


def collectives_count() -> int:
    """How many collectives this process has begun so far, in groups of several ranks."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)  # private: no other way leads to all groups
    groups = list(getattr(world, "pg_map", ())) if job() is not None else []
    return sum(int(group._get_sequence_number_for_group()) for group in groups if group.size() > 1)


def job() -> Any:
    """``torch.distributed``, where it is imported, and not just being imported by another thread, and a job has begun."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_imported = distributed is not None and not getattr(getattr(distributed, "__spec__", None), "_initializing", False)
    return distributed if is_imported and distributed.is_available() and distributed.is_initialized() else None


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None
