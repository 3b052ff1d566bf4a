"""The collectives that this process has issued, from PyTorch's Flight Recorder, which records them by default.

Its stacks are left out: the first dump of them holds the GIL for seconds.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

from torchdebug_magics.ranks.agent import record_of_error

_LATEST = 40
_ERROR_FACTS_LATEST = 3


def rank_of_process() -> tuple[int | None, int | None]:
    """(rank, world size), as torch knows them, or the launcher says; None outside a job."""
    group = _group()
    if group is not None:
        return int(group.get_rank()), int(group.get_world_size())
    texts = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, size = (int(text) if text.isdigit() else None for text in texts)
    return rank, size


def collectives() -> dict[str, Any] | None:
    """The latest collectives, the ranks of each process group, and its last numbers, by the group's name; None outside a job."""
    binding = loaded("torch._C._distributed_c10d")
    if _group() is None or binding is None or not hasattr(binding, "_dump_fr_trace"):
        return None
    dump = pickle.loads(binding._dump_fr_trace(includeCollectives=True, includeStackTraces=False, onlyActive=False))  # noqa: S301 - what torch has just written
    entries = [
        {
            "group": str(entry.get("process_group", ("0",))[0]),
            "number": entry.get("collective_seq_id", 0),
            "op": str(entry.get("profiling_name", "")).rpartition(":")[2],
            "sizes": [list(size) for size in entry.get("input_sizes") or []],
            "dtypes": list(entry.get("input_dtypes") or []),
            "is_done": bool(entry.get("retired")) or entry.get("state") == "completed",
            "is_p2p": bool(entry.get("is_p2p")),
        }
        for entry in dump.get("entries", ())[-_LATEST:]
    ]
    status = {str(name): dict(numbers) for name, numbers in dump.get("pg_status", {}).items()}
    world: Any = getattr(loaded("torch.distributed.distributed_c10d"), "_world", None)  # private: no other way leads to all groups
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    groups = {str(name): sorted(ranks[group]) for group, name in names.items() if group in ranks}
    return {"status": status, "entries": entries, "groups": groups}


def loaded(name: str) -> Any | None:
    """A module that has been imported, and is not just being imported by another thread."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def _group() -> Any:
    distributed = loaded("torch.distributed") if loaded("torch") is not None else None
    return distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None


def error_record(error: BaseException) -> dict[str, Any]:
    """As an agent records the exception that ends its process."""
    return {**record_of_error(error), **error_facts(error)}


def error_facts(error: BaseException) -> dict[str, Any]:
    """Plain data; asked in the process that ends, while its variables are still there."""
    issued = collectives() or {"entries": []}
    rank, _ = rank_of_process()
    found: dict[str, Any] = {"rank": rank, "entries": issued["entries"][-_ERROR_FACTS_LATEST:]}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model: Any = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed" and hasattr(model, "module"):
            found["parameters"] = [name for name, value in model.module.named_parameters() if value.requires_grad]
    return found
