"""What is recorded beside the exception that ends a process: the names of a model's parameters, and the last collectives."""

from __future__ import annotations

import time
import traceback
from typing import Any

from torchdebug_magics.probing.waits.collectives import collectives, rank_of_process

__all__ = ["error_facts", "error_record"]

_LATEST = 3


def error_record(error: BaseException) -> dict[str, Any]:
    """As an agent records the exception that ends its process."""
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    return {"type": type(error).__name__, "message": str(error)[:2000], "at_s": time.time(), "frames": frames, **error_facts(error)}


def error_facts(error: BaseException) -> dict[str, Any]:
    """Plain data; asked in the process that ends, while its variables are still there."""
    issued = collectives() or {"entries": []}
    rank, _ = rank_of_process()
    found: dict[str, Any] = {"rank": rank, "entries": issued["entries"][-_LATEST:]}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model: Any = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed" and hasattr(model, "module"):
            found["parameters"] = [name for name, value in model.module.named_parameters() if value.requires_grad]
    return found
