"""What each op of a run gave, in a few bytes: plain data, to be kept, written and compared elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchdebug_magics.report import Location

__all__ = ["RECORD", "Fingerprint", "OpPrint"]

RECORD = struct.Struct("<IIIBQQdd")
"""Op, place, module, bits, and the four numbers of `OpPrint`; 45 bytes."""


class OpPrint(NamedTuple):
    """One op."""

    op: str
    place: Location | None
    module: str
    is_backward: bool
    is_random: bool
    is_unread: bool
    """Whether it only moved memory that nobody had written: what it gave need not agree."""
    given: int
    """A digest of its plain arguments, and of data that no op before it made."""
    gave: int
    """A digest of what it returned or wrote."""
    total: float
    """The sum of its floating outputs; 0 without any."""
    magnitude: float
    """The sum of their absolute values."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One run, op by op. Names and places are told once; `records` holds a fixed number of bytes for each op."""

    torch_version: str
    device: str
    """Of the accelerator in use, or ``"cpu"``."""
    threads_count: int
    ops: tuple[str, ...]
    places: tuple[Location | None, ...]
    modules: tuple[str, ...]
    records: bytes

    def __len__(self) -> int:
        return len(self.records) // RECORD.size

    def __iter__(self) -> Iterator[OpPrint]:
        for op, place, module, bits, *numbers in RECORD.iter_unpack(self.records):
            yield OpPrint(self.ops[op], self.places[place], self.modules[module], bool(bits & 1), bool(bits & 2), bool(bits & 4), *numbers)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; the records as base64."""
        return {**dataclasses.asdict(self), "records": base64.b64encode(self.records).decode("ascii")}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Fingerprint:
        """Of what `to_dict` wrote; a KeyError or a TypeError where it is something else."""
        return cls(
            torch_version=held["torch_version"],
            device=held["device"],
            threads_count=held["threads_count"],
            ops=tuple(held["ops"]),
            places=tuple(None if place is None else Location(**place) for place in held["places"]),
            modules=tuple(held["modules"]),
            records=base64.b64decode(held["records"]),
        )
