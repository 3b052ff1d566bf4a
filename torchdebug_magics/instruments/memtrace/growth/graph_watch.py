"""Counts the nodes of graphs behind variables, as these grow where no tensor does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

import torch

from torchdebug_magics.instruments.memtrace.growth.loop_steps import FEWEST, Loop, Steps
from torchdebug_magics.instruments.memtrace.held.leak_fixes import graph_fix
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import has_graph
from torchdebug_magics.instruments.memtrace.trace import GraphGrowth
from torchdebug_magics.memory.found import History, histories
from torchdebug_magics.memory.paths import NOWHERE, HolderPath
from torchdebug_magics.probing.tensors import tensors_in
from torchdebug_magics.report import Location

LOOKS_AT = frozenset({3, 5, 8, 13, 21, 34, 55, 89, 233, 610, 1597})
"""Steps at whose beginning it is looked who holds what seems to grow: no multiples of each other, so that nothing that is emptied at times
is always met full."""
_MOST_MARKS = 64
_MARK = "torchdebug_magics"
_LEAST_NODE_BYTES = 256
"""An autograd node takes some hundred bytes."""
_SETTLED = 21
"""From this step on, a process no longer loads what its first steps use."""


class _Mark:
    """Lives as long as the node of a graph on which it hangs."""


class GraphWatch:
    """Counts, at some steps, the nodes behind each variable by the step that made them, once a graph outlives its step."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, dict[HolderPath, History]]] = []
        """(step that begins, by path)."""
        self._marks: list[tuple[int, weakref.ref[_Mark]]] = []
        """(step, of a node that a model has made in it)."""
        self._trained = 0
        """The last step in which a model returned a graph that was in training mode."""
        self._trained_before: dict[int, int] = {}
        """The same, at each look."""
        self._recorded = 0
        """The last step of which it is known that another watch kept a record."""
        self._clear: tuple[int, float] | None = None
        """(step, bytes by which the heap grew in each until then) of the latest look if it met no graph from before the last step."""

    def mark(self, step: int, output: object, module: torch.nn.Module | None) -> None:
        """A model has returned that. What autograd keeps with a node is let go with it, which nothing else tells."""
        if module is not None and next(module.parameters(), None) is not None:  # and no loss, whose mode nobody sets
            self._trained = step if module.training else self._trained
        if len(self._marks) >= _MOST_MARKS and LOOKS_AT.isdisjoint((step + 1, step + 2)):
            return
        node = next((tensor.grad_fn for tensor in tensors_in(output) if has_graph(tensor)), None)
        if node is not None:
            mark = _Mark()
            node.metadata[_MARK] = mark  # type: ignore[index]  # which the stub calls a method
            self._marks.append((step, weakref.ref(mark)))

    def keeps(self, before: int) -> bool:
        """Whether a graph from before that step is still there; of models that no hook is on, nobody knows."""
        return any(step < before and mark() is not None for step, mark in self._marks)

    def look(self, steps: Steps, *, is_recorded: bool) -> None:
        """A step begins; `is_recorded`: the heap grows by what another watch records, and tells nothing."""
        if is_recorded and self._marks:
            self._recorded = steps.count
        self._look(steps.count, steps)

    def _look(self, step: int, steps: Steps) -> None:
        """Before that step, or after the last one; where a graph may grow."""
        main = steps.main
        if main is None or not self._may_grow(step, main):
            return
        found = histories(steps.of_node)
        self._looks.append((step, found))
        self._trained_before[step] = self._trained
        is_clear = step >= _SETTLED and all(min(history.steps, default=step) >= step - 1 for history in found.values())
        self._clear = (step, main.counted_bytes(self._recorded)) if is_clear else None

    def _may_grow(self, step: int, main: Loop) -> bool:
        """Whether a marked graph is kept, or another may be: until a look met none, and where the heap grows faster than it did then."""
        if self.keeps(step - 1) or (self._looks and self._clear is None):
            return True
        since, usual_bytes = self._clear or (self._recorded, 0)
        heap_grows = not main.is_counted or main.counted_bytes(since) >= usual_bytes + _LEAST_NODE_BYTES
        return heap_grows and self._recorded < step

    def growth(self, steps: Steps, line_of: Callable[[HolderPath, History], Location | None]) -> GraphGrowth | None:
        """The cell is over; `line_of` tells where a variable is given what it keeps."""
        main = steps.main
        if main is None or main.count < FEWEST or (self._marks and not self._looks and not self.keeps(steps.count)):
            return None
        self._look(steps.count + 1, steps)
        known = {path for _, found in self._looks for path in found}
        per_step, path = max(((self._nodes_per_step(path, steps, main), path) for path in known), default=(0.0, NOWHERE))
        if not per_step:
            return None
        seen = [found[path] for _, found in self._looks if path in found]
        location = line_of(path, seen[-1])
        return GraphGrowth(
            nodes_per_iteration=max(1, round(per_step * steps.count / main.count)),
            iterations_count=main.count,
            location=location,
            holder=str(path),
            variable=path.variable,
            fix=graph_fix(
                path,
                is_collection=seen[-1].is_collection,
                is_number=any(history.is_number for history in seen),
                line="" if location is None or seen[-1].in_records else location.source,
                entry=seen[-1].entry,
                cure=".detach().requires_grad_()" if seen[-1].begins_anew else ".detach()",
            ),
        )

    def _nodes_per_step(self, path: HolderPath, steps: Steps, main: Loop) -> float:
        """0 where a graph does not grow from look to look."""
        looks = [(at, found.get(path)) for at, found in self._looks]
        if looks[-1][1] is None and path.function:
            looks.pop()  # the function has returned
        # Where the oldest went while younger ones stayed, it is in a list with a limit, or the like.
        whole = [(at, history) for at, history in looks if history is not None and history.count and history.is_whole]
        if any(min(earlier.steps) < min(later.steps) < before for (before, earlier), (_, later) in pairwise(whole)):
            return 0
        rounds = _rounds(looks)
        pairs = [pair for one in rounds for pair in pairwise(one) if pair[0][1].is_whole]
        # Of what is more than can be looked at, the number says nothing; that it grew up to there is known.
        pairs = [pair for pair in pairs if pair[1][1].is_whole] or pairs
        # Most of it is of no use any more: a backward pass has let go what its nodes had saved.
        spent = [pair for pair in pairs if all(2 * len(history.used_up) > len(history.steps) for _, history in pair)]
        if any(len(later.used_up) >= FEWEST for _, (_, later) in spent):
            return _rate(spent)
        # No backward pass has run through it so far: one may be to come, but of an evaluation; with one look, it may be one round's own.
        is_long = any(history.count > 2 * main.nodes_per_step for one in rounds for _, history in one)
        seen = [(at, history) for looks in rounds for at, history in looks]
        loop = steps.of(sorted(set(seen[-1][1].steps))) if seen else None
        is_evaluation = (
            loop is not None
            and not steps.is_trained_in(loop)
            and all(self._trained_before[at] < min(history.steps) for at, history in seen)
        )
        if is_evaluation and len(rounds) > 1:  # one look at a sum tells how many steps are in it
            return max((history.count / len(history.steps) for _, history in seen if len(history.steps) > FEWEST), default=0)
        return _rate(pairs) if len(rounds) == 1 and is_long and not steps.accumulates(main) else 0


def _rate(pairs: Sequence[tuple[tuple[int, History], tuple[int, History]]]) -> float:
    """Nodes a step, where there were ever more."""
    rates = [(many.count - few.count) / (later - earlier) for (earlier, few), (later, many) in pairs]
    mean = fmean(rates) if rates else 0
    return mean if mean > 0 and min(rates) > mean / 2 else 0


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
