"""Watches how long the graphs are that variables keep: ``total += loss`` makes one longer at each step, and keeps no tensor."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.findings import GraphGrowth
from torchdebug_magics.instruments.memtrace.held.fixes import graph_fix, is_local
from torchdebug_magics.probing.holders import histories

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Loop, Steps
    from torchdebug_magics.probing.holders import History
    from torchdebug_magics.report import Location

__all__ = ["GraphWatch"]

_LEAST_NODE_BYTES = 256
"""An autograd node takes some hundred bytes."""
_FEWEST = 3
"""Iterations from which one may speak of growth."""


class GraphWatch:
    """Counts, at some steps, the nodes behind each variable by the step that made them."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, dict[str, History]]] = []
        """(step that begins, by path)."""

    def look(self, steps: Steps) -> None:
        """A step begins."""
        main = steps.main
        if main is not None and (self._looks or not main.is_counted or main.counted_bytes() >= _LEAST_NODE_BYTES):
            self._looks.append((steps.count, histories(steps.of_node)))

    def growth(self, steps: Steps, line_of: Callable[[str, History], Location | None]) -> GraphGrowth | None:
        """The cell is over; `line_of` tells where a variable is given what it keeps."""
        main = steps.main
        if main is None or main.count < _FEWEST:
            return None
        self._looks.append((steps.count + 1, histories(steps.of_node)))
        known = {path for _, found in self._looks for path in found}
        per_step, path = max(((self._nodes_per_step(path, steps, main), path) for path in known), default=(0.0, ""))
        if not per_step:
            return None
        seen = [found[path] for _, found in self._looks if path in found]
        location = line_of(path, seen[-1])
        return GraphGrowth(
            nodes_per_iteration=max(1, round(per_step * steps.count / main.count)),
            iterations_count=main.count,
            location=location,
            holder=path,
            fix=graph_fix(
                path,
                is_collection=seen[-1].is_collection,
                is_number=any(history.is_number for history in seen),
                line="" if location is None else location.source,
                cure=".detach().requires_grad_()" if seen[-1].begins_anew else ".detach()",
            ),
        )

    def _nodes_per_step(self, path: str, steps: Steps, main: Loop) -> float:
        """0 where a graph does not grow from look to look."""
        looks = [(at, found.get(path)) for at, found in self._looks]
        if looks[-1][1] is None and is_local(path):
            looks.pop()  # the function has returned
        if _slides(looks):
            return 0
        rounds = _rounds(looks)
        pairs = [pair for one in rounds for pair in pairwise(one) if pair[0][1].is_whole]
        spent = [pair for pair in pairs if all(_is_spent(history) for _, history in pair)]
        if any(len(later.used_up) >= _FEWEST for _, (_, later) in spent):
            return _rate(spent)
        # No backward pass has run through it so far, and one may be to come; with one look, it may be one round's own.
        is_long = any(history.count > 2 * main.nodes_per_step for one in rounds for _, history in one)
        return _rate(pairs) if len(rounds) == 1 and is_long and not steps.accumulates(main) else 0


def _rate(pairs: Sequence[tuple[tuple[int, History], tuple[int, History]]]) -> float:
    """Nodes a step, where there were ever more."""
    rates = [(many.count - few.count) / (later - earlier) for (earlier, few), (later, many) in pairs]
    mean = fmean(rates) if rates else 0
    return mean if mean > 0 and min(rates) > mean / 2 else 0


def _slides(looks: Sequence[tuple[int, History | None]]) -> bool:
    """Whether the oldest went while younger ones stayed, as in a list with a limit."""
    seen = [(at, history) for at, history in looks if history is not None and history.count and history.is_whole]
    return any(min(earlier.steps) < min(later.steps) < before for (before, earlier), (_, later) in pairwise(seen))


def _rounds(looks: Sequence[tuple[int, History | None]]) -> list[list[tuple[int, History]]]:
    """The looks between which nothing was cut off: a sum that begins anew with each epoch begins another round."""
    found: list[list[tuple[int, History]]] = []
    for at, history in looks:
        if history is None or not history.count:
            continue
        if not found or (history.is_whole and min(history.steps) > min(found[-1][-1][1].steps)):
            found.append([])
        found[-1].append((at, history))
    return found


def _is_spent(history: History) -> bool:
    """Whether most of it is of no use any more, as a backward pass has let go what its nodes had saved."""
    return 2 * len(history.used_up) > len(history.steps)
