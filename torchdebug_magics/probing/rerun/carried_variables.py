"""Variables that a step both reads and later overwrites: their values at its start, which a replay must begin with."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from torchdebug_magics.probing.source.statement_lists import lists_around, parse, read_before_written, written
from torchdebug_magics.probing.where import local_values, owner, span

if TYPE_CHECKING:
    from torchdebug_magics.probing.rerun.frame_positions import Place, Position

__all__ = ["LiveIn", "LiveInKeeper"]


@dataclass(frozen=True)
class LiveIn:
    """By frame, the values that would otherwise be lost."""

    values: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, frame: FrameType) -> Mapping[str, Any]:
        """The values of one frame."""
        return self.values.get(id(frame), {})


class LiveInKeeper:
    """Takes them again and again. A step that begins where the last one began reads and overwrites the same variables."""

    def __init__(self) -> None:
        self._places: tuple[Place, ...] = ()
        self._names: list[tuple[int, frozenset[str]]] = []
        """By how far out a frame is."""

    def take(self, chain: tuple[Position, ...], places: tuple[Place, ...]) -> LiveIn | None:
        """Of the frames of a chain, which stand at `places`; None where no frame has such a variable, which is the usual case."""
        if places != self._places:
            found = ((level, _carried(one.frame.f_code, one.instruction, one.line)) for level, one in enumerate(chain))
            self._places, self._names = places, [(level, names) for level, names in found if names]
        values = {id(chain[level].frame): local_values(chain[level].frame, names) for level, names in self._names}
        return LiveIn(values) if values else None


@functools.lru_cache(maxsize=256)
def _carried(code: CodeType, instruction: int, line: int) -> frozenset[str]:
    tree = parse(code.co_filename) if owner(code.co_filename) in {"user", "library"} else None
    if tree is None:
        return frozenset()
    where = span(code, instruction) or (line, -1, line, -1)
    statements: list[ast.stmt] = []
    for body, start in lists_around(tree, where):
        statements += body[start:] if not statements else body[start + 1 :]
    return frozenset(read_before_written(statements) & written(statements))
