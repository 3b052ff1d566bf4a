"""What each op of a run gave, in a few bytes: plain data, to be kept, written and compared elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torchdebug_magics.report import Location

RECORD = struct.Struct("<IIIBQQdd")
"""Op, place, module, bits, and the four numbers of `OpPrint`; 45 bytes."""
OVERWRITTEN = 1 << 31
"""Added to the number of an op whose result is not read, but written over."""


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


class Update(NamedTuple):
    """One step of an optimizer, as it began."""

    first: int
    """The number of its first op."""
    end: int
    """The number of the first op after it."""
    optimizer: str
    """Its class."""
    state: tuple[str, ...]
    """Names of the tensors that it goes on with, such as ``exp_avg``; none at its first step."""
    settings: tuple[tuple[str, str], ...]
    """Learning rate and other numbers of its parameter groups, by name."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One run, op by op. Names and places are stored once; `records` holds a fixed number of bytes for each op."""

    torch_version: str
    device: str
    """Of the accelerator in use, or ``"cpu"``."""
    threads_count: int
    ops: tuple[str, ...]
    places: tuple[Location | None, ...]
    modules: tuple[str, ...]
    records: bytes
    flow: bytes = b""
    """For each op, how many numbers follow, then the numbers of the ops that made what it is given, as `Printer` wrote them."""
    updates: tuple[Update, ...] = ()
    code: tuple[Location, ...] = ()
    """Every line of the cells that ran."""

    def __len__(self) -> int:
        return len(self.records) // RECORD.size

    def __iter__(self) -> Iterator[OpPrint]:
        for op, place, module, bits, *numbers in RECORD.iter_unpack(self.records):
            yield OpPrint(self.ops[op], self.places[place], self.modules[module], bool(bits & 1), bool(bits & 2), bool(bits & 4), *numbers)

    def flows(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each op the numbers of the ops that made, wrote or first met what it reads, and what it writes over; empty in an old file."""
        numbers = iter(array("I", self.flow))
        for _ in range(len(self)):
            given = [*islice(numbers, next(numbers, 0))]
            yield tuple(one for one in given if one < OVERWRITTEN), tuple(one - OVERWRITTEN for one in given if one >= OVERWRITTEN)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; bytes as base64."""
        return {**dataclasses.asdict(self), **{name: base64.b64encode(getattr(self, name)).decode("ascii") for name in ("records", "flow")}}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Fingerprint:
        """Of what `to_dict` wrote; a KeyError or a TypeError where it is something else."""
        updates = (
            Update(first, end, optimizer, tuple(state), tuple((name, value) for name, value in settings))
            for first, end, optimizer, state, settings in held.get("updates", ())
        )
        read: dict[str, Any] = {
            **{name: held[name] for name in ("torch_version", "device", "threads_count")},
            **{name: tuple(held[name]) for name in ("ops", "modules")},
            **{name: base64.b64decode(held.get(name, "")) for name in ("records", "flow")},
            "places": tuple(None if place is None else Location(**place) for place in held["places"]),
        }
        return cls(**read, updates=tuple(updates), code=tuple(Location(**place) for place in held.get("code", ())))
