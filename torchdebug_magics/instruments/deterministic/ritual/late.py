"""What can no longer be set in a process that runs: it is said, not pretended."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchdebug_magics.probing.names import Named

__all__ = ["began_with", "has_workers", "too_late"]

_ENVIRONMENT = Path("/proc/self/environ")


def too_late(loaders: Iterable[Named]) -> Iterator[str]:
    """A sentence each, to be asked before anything is set."""
    if sys.flags.hash_randomization and not (began_with("PYTHONHASHSEED") or "random").isdigit():
        yield (
            "PYTHONHASHSEED needs a restart: Python reads it once, at startup, so the order of string sets and `hash()` still vary between "
            "kernels. It is set for child processes; for this one, start the kernel with PYTHONHASHSEED=0, or sort what you iterate over."
        )
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        yield (
            "CUBLAS_WORKSPACE_CONFIG needs a restart: it is read when CUDA is initialized, which has already happened. This PyTorch no "
            "longer needs it for matrix products, but cuDNN RNN layers do: for those, restart the kernel and open the session first."
        )
    for name in (one.name for one in loaders if has_workers(one.value)):
        yield (
            f"`{name}` keeps its workers' seeds: they have been running since an earlier cell (persistent_workers=True). "
            f"Create `{name}` in this cell."
        )


def began_with(variable: str) -> str | None:
    """What the interpreter found in its environment when it started; None where it found nothing."""
    try:
        entries = _ENVIRONMENT.read_bytes().split(b"\0")
    except OSError:  # another system: nothing tells what stood there at the start
        return os.environ.get(variable)
    found = dict(entry.partition(b"=")[::2] for entry in entries)
    return os.fsdecode(found[variable.encode()]) if variable.encode() in found else None


def has_workers(loader: Any) -> bool:
    """Whether a DataLoader's workers are alive between two loops."""
    return vars(loader).get("_iterator") is not None
