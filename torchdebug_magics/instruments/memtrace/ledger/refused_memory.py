"""When memory was refused: what was asked for, by whom, and what was alive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.ledger.allocation_lines import Place
    from torchdebug_magics.instruments.memtrace.ledger.blocks import Block
    from torchdebug_magics.instruments.memtrace.ledger.phases import Span

__all__ = ["OutOfMemory", "refused_bytes"]

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CUDA = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB|TiB)")
_CPU = re.compile(r"you tried to allocate (\d+) bytes")
_WORDS = ("out of memory", "not enough memory", "can't allocate memory")


@dataclass(frozen=True)
class OutOfMemory:
    """One refusal; it holds no tensor, frame or exception."""

    error_id: int
    asked_bytes: int
    op: str
    module: str
    place: Place | None
    span: Span
    iteration: int
    alive: tuple[Block, ...] = field(repr=False)


def refused_bytes(error: BaseException) -> int | None:
    """How much was asked for, 0 where the error does not tell; None where it is about something else."""
    text = str(error)
    if (found := _CPU.search(text)) is not None:
        return int(found[1])
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(words in text for words in _WORDS):
        return None
    found = _CUDA.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found is not None else 0
