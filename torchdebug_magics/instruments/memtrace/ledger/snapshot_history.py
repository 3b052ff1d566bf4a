"""The ledger in the format of a snapshot of CUDA's allocator: the events of each device, and the blocks that are alive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.memtrace.ledger.memory_census import OTHER
from torchdebug_magics.instruments.memtrace.ledger.sites import category

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger

__all__ = ["history"]

_UNKNOWN = "unknown"
"""A category that the page fails without, where there are any; so the last event, as of CUDA's own snapshots, is always of it."""
_FIRST_ADDRESS = 1 << 20
"""Not 0, which a reader may take for none."""


def history(ledger: Ledger) -> dict[str, Any]:
    """``device_traces`` and ``segments``, a device each, in the order of `Ledger.devices`.

    Addresses are made up: what counts is that no two blocks share one at the same time. A block that dies here and is not born here was
    there before: so a reader takes it, too. One without bytes has no place.
    """
    rooms = {name: _Room() for name in ledger.devices}
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in rooms}
    for block in filter(_has_bytes, ledger.old):
        rooms[block.device].put(block)
    for block in filter(_has_bytes, ledger.events):
        room, trace = rooms[block.device], traces[block.device]
        if not room.has(block):
            trace.append(_event("alloc", room.put(block), block))
        else:
            address = room.take(block)
            trace += [_event(action, address, block) for action in ("free_requested", "free_completed")]
    segments = [_segment(at, room) for at, room in enumerate(rooms.values())]
    for trace in traces.values():
        trace.append({"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": _UNKNOWN})
    return {"device_traces": list(traces.values()), "segments": [one for one in segments if one["total_size"]]}


def _category(block: Block) -> str:
    """In the words of torch's own."""
    found = category(block)
    return _UNKNOWN if found == OTHER else found.replace(" ", "_")


def _has_bytes(block: Block) -> bool:
    return block.bytes > 0


class _Room:
    """Addresses of one device: a freed one is used again for the next block of that size, so that loops stay in their place."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, Block]] = {}
        """(address, block) of what is alive."""
        self.end = _FIRST_ADDRESS
        self._free: dict[int, list[int]] = defaultdict(list)

    def has(self, block: Block) -> bool:
        return id(block) in self.blocks

    def put(self, block: Block) -> int:
        free = self._free[block.bytes]
        address = free.pop() if free else self.end
        self.end = max(self.end, address + block.bytes)
        self.blocks[id(block)] = (address, block)
        return address

    def take(self, block: Block) -> int:
        address, _ = self.blocks.pop(id(block))
        self._free[block.bytes].append(address)
        return address


def _event(action: str, address: int, block: Block) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": block.bytes,
        "stream": 0,
        "frames": _frames(block),
        "category": _category(block),
    }


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


def _segment(device: int, room: _Room) -> dict[str, Any]:
    held = sorted(room.blocks.values(), key=lambda one: one[0])
    size_bytes = sum(block.bytes for _, block in held)
    return {
        "device": device,
        "address": _FIRST_ADDRESS,
        "total_size": room.end - _FIRST_ADDRESS,
        "allocated_size": size_bytes,
        "active_size": size_bytes,
        "requested_size": size_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": list(_filled(held, room.end)),
    }


def _filled(held: Iterable[tuple[int, Block]], end: int) -> Iterator[dict[str, Any]]:
    """The blocks, and the gaps between them."""
    at = _FIRST_ADDRESS
    for address, block in held:
        if address > at:
            yield _gap(at, address)
        at = address + block.bytes
        state = {"state": "active_allocated", "frames": _frames(block), "category": _category(block)}
        yield {"address": address, "size": block.bytes, "requested_size": block.bytes, **state}
    if end > at:
        yield _gap(at, end)


def _gap(first: int, end: int) -> dict[str, Any]:
    return {"address": first, "size": end - first, "requested_size": 0, "state": "inactive", "frames": []}
