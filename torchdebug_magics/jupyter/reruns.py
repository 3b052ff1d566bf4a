"""Memory of instruments across runs of the same cell."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from torchdebug_magics.jupyter.cell import running_cells

__all__ = ["Reruns"]

_CELLS = 32
_RUNS = 5
"""Runs remembered for each cell."""


class Reruns:
    """Memories of the latest cells, by their text, as a rerun cell has a new number."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], deque[Any]] = OrderedDict()

    def of_running_cell(self, name: str) -> deque[Any] | None:
        """The memory of the instrument `name` for the running cell; None outside a cell."""
        source = getattr(getattr(next(running_cells(), None), "info", None), "raw_cell", None)
        if not isinstance(source, str):
            return None
        runs = self._runs.setdefault((name, source), deque(maxlen=_RUNS))
        self._runs.move_to_end((name, source))
        while len(self._runs) > _CELLS:
            self._runs.popitem(last=False)
        return runs
