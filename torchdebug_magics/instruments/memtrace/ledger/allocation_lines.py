"""Lines that allocate, and what is remembered of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from torchdebug_magics.probing.lines import Line, Lines

__all__ = ["Place", "Places"]


class Place(Line):
    """A line that allocates."""

    def __init__(self, file: str, line: int, function: str) -> None:
        super().__init__(file, line, function)
        self.steps: dict[Hashable, set[int]] = defaultdict(set)
        """By who asked, as `Block.source` has it: the steps in which it was seen to allocate."""
        self.count = 0
        """Allocations."""


Places = Lines[Place]
