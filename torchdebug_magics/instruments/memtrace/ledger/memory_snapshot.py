"""``--snapshot``: the history of allocations as a file for pytorch.org/memory_viz, one a rank.

Where CUDA is in use, it is what CUDA's own allocator has recorded; else the ledger, in the same format.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.memtrace.ledger.snapshot_history import history
from torchdebug_magics.probing.this_rank import rank, world_size

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Ledger
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Snapshot", "rank_path"]

_RANK = "{rank}"
_MOST_ENTRIES = 100_000
"""Of CUDA's allocator, some KB each: the latest are kept."""


class Snapshot:
    """Records while the cell runs, as far as CUDA has to be asked for it, and writes at the end."""

    def __init__(self, path: str | Path, guard: Guard) -> None:
        self._path = _checked(Path(path).expanduser())
        self._guard = guard
        self._stack = ExitStack()
        self._cuda_was_used = False

    def attach(self, stack: ExitStack) -> None:
        """Let CUDA's allocator record, where it is in use and nobody has it record already."""
        stack.callback(self.stop)
        self._cuda_was_used = torch.cuda.is_initialized()
        if self._cuda_was_used and not torch._C._cuda_isHistoryEnabled():
            self._stack.callback(torch.cuda.memory._record_memory_history, None)
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_MOST_ENTRIES)

    def stop(self) -> None:
        """Put the allocator back. Harmless the second time."""
        self._stack.close()

    def write(self, ledger: Ledger) -> str:
        """The path of the file; the ledger is complete."""
        path = rank_path(self._path)
        _write(path, self._taken(ledger))
        return str(path)

    def _taken(self, ledger: Ledger) -> Any:
        if not torch.cuda.is_initialized():
            return history(ledger)
        if not self._cuda_was_used:
            self._guard.note(
                "CUDA was not in use when the cell began: its snapshot has what is alive, and no history; run the cell again for that"
            )
        return torch.cuda.memory._snapshot()


def rank_path(path: Path) -> Path:
    """With the rank in the place of ``{rank}``; in a job of several, a name without one gets it, so that no rank overwrites another's."""
    here = rank() or 0
    if _RANK in path.name:
        return path.with_name(path.name.replace(_RANK, str(here)))
    return path.with_name(f"{path.stem}_{here}{path.suffix}") if world_size() > 1 else path


def _checked(path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir():
        msg = f"--snapshot cannot write {str(path)!r}: {'it is a folder' if path.is_dir() else 'its folder is not there'}"
        raise TorchDebugError(msg)
    return path


def _write(path: Path, taken: Any) -> None:
    """Whole or not at all: beside its place first."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            pickle.dump(taken, file)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
