"""What each op of a run gave, in a few bytes: plain data, to be kept, written and compared elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.report import Location

__all__ = ["Fingerprint"]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One run, op by op. Names and places are told once; `records` holds a fixed number of bytes for each op."""

    torch_version: str
    device: str
    ops: tuple[str, ...]
    places: tuple[Location | None, ...]
    modules: tuple[str, ...]
    records: bytes
