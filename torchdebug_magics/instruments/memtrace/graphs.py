"""Watches how long the graphs are that variables keep: ``total += loss`` makes one longer at each step, and keeps no tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.memtrace.fixes import graph_fix, is_local
from torchdebug_magics.instruments.memtrace.report import GraphGrowth
from torchdebug_magics.probing.holders import Histories, count_graph_nodes

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.steps import Loop, Steps

__all__ = ["GraphWatch"]

_LEAST_NODE_BYTES = 256
"""An autograd node takes some hundred bytes."""
_FEWEST = 3
"""Iterations from which one may speak of growth."""


class GraphWatch:
    """Of one cell."""

    def __init__(self) -> None:
        self._since = _get_sequence_nr()
        """Autograd nodes with a lower number were there before."""
        self._histories: list[tuple[int, Histories]] = []
        """(step, nodes of graphs by the variable that holds them)."""

    def look(self, steps: Steps) -> None:
        """A step begins."""
        main = steps.main
        if main is not None and (self._histories or main.counted_bytes() >= _LEAST_NODE_BYTES):
            self._histories.append((steps.count, count_graph_nodes(self._since)))

    def growth(self, steps: Steps) -> GraphGrowth | None:
        """The cell is over."""
        main = steps.main
        if main is None or main.count < _FEWEST or steps.accumulates(main):
            return None
        self._histories.append((steps.count + 1, count_graph_nodes(self._since)))
        known = {path for _, histories in self._histories for path in histories.nodes}
        per_step, path = max(((self._nodes_per_step(path, main), path) for path in known), default=(0.0, ""))
        if not per_step:
            return None
        return GraphGrowth(
            nodes_per_iteration=round(per_step * steps.count / main.count),
            iterations_count=main.count,
            holder=path,
            fix=graph_fix(
                path,
                is_collection=any(path in histories.collections for _, histories in self._histories),
                is_number=any(path in histories.numbers for _, histories in self._histories),
            ),
        )

    def _nodes_per_step(self, path: str, main: Loop) -> float:
        """0 where a graph does not grow from look to look: one step's own is always there, and some are cut off at times."""
        looks = [(at, histories.nodes.get(path, 0)) for at, histories in self._histories]
        if not looks[-1][1] and is_local(path):
            looks.pop()  # the function has returned
        while looks and not looks[0][1]:
            looks.pop(0)
        if not looks or looks[-1][1] <= 2 * main.nodes_per_step:
            return 0
        if len(looks) == 1:
            return 0  # it may be one round's own, as where losses are summed up for an update
        rates = [(many - few) / (later - earlier) for (earlier, few), (later, many) in pairwise(looks)]
        mean = (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])
        return mean if min(rates) > mean / 2 else 0
