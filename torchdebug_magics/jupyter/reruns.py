"""What an instrument remembers from one run of a cell to the next."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from torchdebug_magics.jupyter.cell import running_cells

__all__ = ["Reruns"]

_CELLS = 32
_RUNS = 5
"""Remembered of a cell: the latest."""


class Reruns:
    """By the text of the cell, as the same one has another number each time; of the latest cells."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], deque[Any]] = OrderedDict()

    def of_running_cell(self, name: str) -> deque[Any] | None:
        """What the instrument `name` has put there in the runs before; None where no cell runs."""
        source = getattr(getattr(next(running_cells(), None), "info", None), "raw_cell", None)
        if not isinstance(source, str):
            return None
        runs = self._runs.setdefault((name, source), deque(maxlen=_RUNS))
        self._runs.move_to_end((name, source))
        while len(self._runs) > _CELLS:
            self._runs.popitem(last=False)
        return runs
