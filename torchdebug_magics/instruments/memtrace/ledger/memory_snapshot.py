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
from typing import Any

import torch

from torchdebug_magics.errors import refuse
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, category
from torchdebug_magics.instruments.memtrace.trace import OTHER
from torchdebug_magics.probing.distributed.this_rank import rank, world_size
from torchdebug_magics.probing.safety import Guard

_RANK = "{rank}"
_MOST_ENTRIES = 100_000
"""Of CUDA's allocator, some KB each: the latest are kept."""
_UNKNOWN = "unknown"
"""A category that the page fails without, where there are any; so the last event, as of CUDA's own snapshots, is always of it."""
_FIRST_ADDRESS = 1 << 20
"""Not 0, which a reader may take for none."""


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
        is_of_cuda = torch.cuda.is_initialized()
        if is_of_cuda and not self._cuda_was_used:
            self._guard.note(
                "CUDA was not in use when the cell began: its snapshot has what is alive, and no history; run the cell again for that"
            )
        _write(path, torch.cuda.memory._snapshot() if is_of_cuda else history(ledger))
        return str(path)


def rank_path(path: Path) -> Path:
    """With the rank in the place of ``{rank}``; in a job of several, a name without one gets it, so that no rank overwrites another's."""
    here = rank() or 0
    if _RANK in path.name:
        return path.with_name(path.name.replace(_RANK, str(here)))
    return path.with_name(f"{path.stem}_{here}{path.suffix}") if world_size() > 1 else path


def _checked(path: Path) -> Path:
    why = f"--snapshot cannot write {str(path)!r}: {'it is a folder' if path.is_dir() else 'its folder is not there'}"
    refuse(path.is_dir() or not path.parent.is_dir(), why)
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


def history(ledger: Ledger) -> dict[str, Any]:
    """``device_traces`` and ``segments``, a device each, in the order of `Ledger.devices`.

    Addresses are made up, one behind the other: what counts is that no two blocks share one. A block that dies here and is not born here
    was there before: so a reader takes it, too. One without bytes has no place.
    """
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in ledger.devices}
    alive: dict[int, tuple[int, Block]] = {}
    end = _FIRST_ADDRESS
    for at, block in enumerate((*ledger.old, *ledger.events)):
        if id(block) in alive:
            address, _ = alive.pop(id(block))
            traces[block.device] += [_event(action, address, block) for action in ("free_requested", "free_completed")]
        elif block.bytes:
            if at >= len(ledger.old):
                traces[block.device].append(_event("alloc", end, block))
            alive[id(block)] = (end, block)
            end += block.bytes
    segments = [_segment(list(traces).index(block.device), address, block) for address, block in alive.values()]
    for trace in traces.values():
        trace.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": _UNKNOWN})
    return {"device_traces": list(traces.values()), "segments": segments}


def _category(block: Block) -> str:
    """In the words of torch's own."""
    found = category(block)
    return _UNKNOWN if found == OTHER else found.replace(" ", "_")


def _event(action: str, address: int, block: Block) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": block.bytes, "stream": 0, "frames": _frames(block), "category": _category(block)}


def _frames(block: Block) -> list[dict[str, Any]]:
    """The user's line first, as in a traceback that is read from below; around it, the module."""
    frames = []
    if block.place is not None:
        location = block.place.location
        file = location.file if location.cell is None else f"In[{location.cell}]"
        frames.append({"filename": file, "line": location.line, "name": location.function})
    if block.module:
        frames.append({"filename": "none", "line": 0, "name": block.module})
    return frames


def _segment(device: int, address: int, block: Block) -> dict[str, Any]:
    """A segment for each block that is alive: where it would be among others is made up."""
    said = {"address": address, "requested_size": block.bytes, "frames": _frames(block)}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), block.bytes)
    where = {"device": device, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
    inside = {**said, "size": block.bytes, "state": "active_allocated", "category": _category(block)}
    return {**said, **sizes, **where, "blocks": [inside]}
