"""Watches a loop for growth while it runs, as what a function keeps is gone when the cell is over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from torch._C._autograd import _get_sequence_nr

from torchdebug_magics.instruments.memtrace.census import GRADIENT, OPTIMIZER_STATE, PARAMETER, Census
from torchdebug_magics.instruments.memtrace.counted import fastest, grown_by_counter, kept_most, rate_bytes
from torchdebug_magics.instruments.memtrace.fixes import collection, graph_fix, is_part
from torchdebug_magics.instruments.memtrace.growth import LEAST_BYTES, leaking, repeated
from torchdebug_magics.instruments.memtrace.keepers import Keepers, grown
from torchdebug_magics.instruments.memtrace.report import GraphGrowth
from torchdebug_magics.instruments.memtrace.tally import Tally, place_of
from torchdebug_magics.probing.holders import Histories, count_graph_nodes, find_holders

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.blocks import Block, Ledger
    from torchdebug_magics.instruments.memtrace.counted import Kept
    from torchdebug_magics.instruments.memtrace.growth import Leak
    from torchdebug_magics.instruments.memtrace.places import Place
    from torchdebug_magics.instruments.memtrace.report import Growth
    from torchdebug_magics.instruments.memtrace.steps import Loop, Steps

__all__ = ["GrowthWatch"]

_LOOKS_AT = frozenset({5, 8, 13, 21, 34, 55, 89, 233, 610, 1597})
"""Steps at whose beginning it is looked who holds what seems to grow: no multiples of each other, so that nothing that is emptied at times
is always met full."""
_MOST_AGAIN = 24
"""Steps followed at once, to see what is kept only at times made."""
_LATEST_LIGHT_LOOK = 40
_LEAST_NODE_BYTES = 256
"""An autograd node takes some hundred bytes."""
_FEWEST = 3
"""Iterations from which one may speak of growth."""
_LARGE_BYTES = 1 << 10
_LARGE_PART = 0.25
"""What is less than both, an iteration and in all, is data that one wants to keep."""
_IS_KEPT_BY_DESIGN = ("grad_fn", "hook", "<closure", "cache")
"""Where no model is called, a list of tensors is what was wanted; a graph, a hook and a cache are kept unseen."""
_STEPS_A_STAGE = 2
"""From so many on, a part that a model gets belongs to a stage, and not to an iteration."""
_BOUNDED = ("['old_dirs']", "['old_stps']", "['ro']")
"""The history of L-BFGS, which has a limit."""


class GrowthWatch:
    """Of one cell."""

    def __init__(self, ledger: Ledger, steps: Steps, *, is_light: bool = False) -> None:
        self._ledger = ledger
        self._steps = steps
        self._is_light = is_light
        self._since = _get_sequence_nr()
        """Autograd nodes with a lower number were there before."""
        self._kept: Kept | None = None
        """Where no op is followed: what seemed to grow, while the loop ran."""
        self._paths: dict[Place, str] = {}
        """Who held what seemed to grow, while the loop ran."""
        self._histories: list[tuple[int, Histories]] = []
        """(step, nodes of graphs by the variable that holds them)."""
        self._tally = Tally()
        self._weighed = (0, 0)
        """(step, bytes of the heap) of the last look."""
        self._ended = 0
        """Events until the end of the cell."""

    def begins(self, adopt: Callable[[Census], None]) -> None:
        """A step begins; `adopt` takes what was made unseen into the ledger."""
        if self._steps.count not in _LOOKS_AT:
            return
        if self._is_light:
            self._look_lightly()
        leaks = [leak for leak in leaking(self._ledger.live.values(), self._steps) if leak.place not in self._paths]
        if leaks:
            keepers = Keepers(block for leak in leaks for block in leak.blocks)
            self._paths.update((leak.place, keepers.path(leak.blocks)) for leak in leaks if leak.place and keepers.path(leak.blocks))
        main = self._steps.main
        if main is not None and (self._histories or main.usual_bytes >= _LEAST_NODE_BYTES):
            self._histories.append((self._steps.count, count_graph_nodes(self._since)))
        if not self._is_light and main is not None and self._has_grown(main):
            adopt(Census())
            made = [block for block in self._ledger.live.values() if not block.is_old]
            self._tally.weigh(self._steps.count, made, Keepers(made))
            each = self._tally.steps_each()
            if each:
                self._steps.again(min(_MOST_AGAIN, round(each) + 1))

    def _has_grown(self, loop: Loop) -> bool:
        """Whether the heap has, since the last look, by more than nothing to speak of."""
        (step, heap_bytes), self._weighed = self._weighed, (self._steps.count, loop.heap[-1])
        return loop.heap[-1] - heap_bytes >= _LARGE_BYTES * (self._steps.count - step)

    def ends(self) -> None:
        """The cell is over; what only the collector finds from here on, nobody kept."""
        self._ended = self._ledger.clock

    def _look_lightly(self) -> None:
        loop = fastest(self._steps.loops.values())
        if loop is None or loop.count > _LATEST_LIGHT_LOOK:
            return
        found = {storage._cdata: storage for storage, _ in Census().storages() if self._ledger.known(storage) is None}
        held = find_holders(found)
        pieces = [(storage.nbytes(), held.paths.get(key, "")) for key, storage in found.items() if key not in held.bounded]
        self._kept = kept_most(pieces, rate_bytes(loop) * loop.count) or self._kept

    def found(self, made: Sequence[Block], keepers: Keepers, peak_bytes: int) -> tuple[Growth | None, GraphGrowth | None]:
        """What grew until the last step; `made` is what is still there, `peak_bytes` what it is measured by."""
        if self._is_light and self._steps.count:
            return self._found_lightly(made, keepers)
        if not self._steps.count:
            named = [(leak, keepers.path(leak.blocks)) for leak in repeated(made)]
            named = [one for one in named if any(word in one[1].lower() for word in _IS_KEPT_BY_DESIGN)]
        else:
            leaks = [leak for leak in leaking(self._followed(made), self._steps, is_over=True) if not self._was_result(leak)]
            leaks = [leak for leak in leaks if leak.keeps_graph or not keepers.are_bounded(leak.blocks)]
            named = self._unintended([(leak, self._named(leak, keepers)) for leak in leaks])
            named += self._at_times(made, keepers, {collection(path) for _, path in named})
        graph = self._graph_growth()
        return self._growth(named, graph, keepers, peak_bytes), graph

    def _found_lightly(self, made: Sequence[Block], keepers: Keepers) -> tuple[Growth | None, GraphGrowth | None]:
        loop = fastest(self._steps.loops.values())
        kept = None
        if loop is not None:
            pieces = [(block.bytes, keepers.of(block)) for block in made if not keepers.are_bounded([block])]
            then = self._kept if self._kept is not None and self._counts_after_return(self._kept[0], loop) else None
            kept = kept_most(pieces, rate_bytes(loop) * loop.count) or then
            kept = None if kept is not None and "grad_fn" in kept[0] and self._steps.accumulates(loop) else kept
        graph = self._graph_growth()
        return grown_by_counter(loop, kept, trains=self._steps.is_training(loop)), graph

    def _growth(self, named: Sequence[tuple[Leak, str]], graph: GraphGrowth | None, keepers: Keepers, peak_bytes: int) -> Growth | None:
        named = [one for one in named if not any(word in one[1] for word in _BOUNDED)]
        if not named:
            return None
        if any(leak.role == PARAMETER for leak, _ in named):  # what optimizers keep for them follows from them
            named = [one for one in named if one[0].role not in {OPTIMIZER_STATE, GRADIENT}]
        most = max(_by_holder(named), key=_kept_bytes)
        together = [leak for leak, _ in most]
        through_graph = any("grad_fn" in other for _, other in most)
        has_graph = graph is not None and any(other.startswith(graph.holder) for _, other in most)
        is_nameless = not any(other for _, other in most)
        keeps_graph = through_graph or has_graph or (is_nameless and any(leak.keeps_graph for leak in together))
        # What is in a graph, or made with one, shows where the graph is kept; with it, inputs are kept that may be larger.
        shown = [one for one in most if keeps_graph and one[0].keeps_graph] or most
        first, path = max(shown, key=lambda one: one[0].bytes_per_iteration)
        if keeps_graph and not first.keeps_graph:
            first = replace(first, place=place_of(keepers.beside(path)) or first.place)
        size_bytes = round(_kept_bytes(most) / max(1, first.iterations_count))
        others = {collection(other) for leak, other in named if other and leak.bytes_per_iteration >= LEAST_BYTES} - {collection(path)}
        is_little = size_bytes < _LARGE_BYTES and size_bytes * first.iterations_count < _LARGE_PART * peak_bytes
        if size_bytes < LEAST_BYTES or (is_little and not keeps_graph):
            return None
        return grown(
            first,
            path,
            size_bytes,
            keeps_graph=keeps_graph,
            swells=any(leak.swells for leak in together),
            trains=self._steps.is_training(first.loop),
            slices=keepers.are_slices(first.blocks),
            others=tuple(sorted(others)),
        )

    def _named(self, leak: Leak, keepers: Keepers) -> str:
        """As the user knows it: after an error its traceback holds all, and the name of a running call is gone with the call."""
        then, now = "" if leak.place is None else self._paths.get(leak.place, ""), keepers.path(leak.blocks)
        if keepers.has_error or not now:
            return then or now
        # What was in a list of its own then may be in a list of such lists by now.
        return now if " local " in then or keepers.holds_most(leak.blocks, now) else then or now

    def _at_times(self, made: Sequence[Block], keepers: Keepers, known: Collection[str]) -> list[tuple[Leak, str]]:
        """What only some calls leave behind; without the collections that are known to grow."""
        main = self._steps.main
        if main is None:
            return []
        self._tally.weigh(self._steps.count + 1, made, keepers)
        found = [(leak, path) for leak, path in self._tally.growing(main) if collection(path) not in known]
        return [
            (leak, path) for leak, path in found if not (leak.keeps_graph and self._steps.accumulates(main)) and not self._was_result(leak)
        ]

    def _unintended(self, named: Sequence[tuple[Leak, str]]) -> list[tuple[Leak, str]]:
        """Without a model that gets another part at times, as in stages, and what its optimizer then needs for it."""
        meant = [leak for leak, path in named if leak.role == PARAMETER and is_part(path) and self._is_in_stages(leak)]
        also = {OPTIMIZER_STATE, GRADIENT} if meant else set()
        return [(leak, path) for leak, path in named if leak not in meant and leak.role not in also]

    def _is_in_stages(self, leak: Leak) -> bool:
        main, made = self._steps.main, {block.iteration for block in leak.blocks}
        return main is not None and len(main.between(min(made), max(made))) >= _STEPS_A_STAGE * (len(made) - 1)

    def _counts_after_return(self, path: str, loop: Loop | None) -> bool:
        """Whether what a call kept counts when it is gone: without a graph and without training it is a prediction, or a text."""
        return "grad_fn" in path or self._steps.is_training(loop)

    def _was_result(self, leak: Leak) -> bool:
        return all(block.died for block in leak.blocks) and not (leak.keeps_graph or self._steps.is_training(leak.loop))

    def _followed(self, made: Sequence[Block]) -> Iterable[Block]:
        """With those that are gone by now: a function that held them may have returned, and how long they lived tells of windows."""
        known = {id(block): block for block in (*made, *self._ledger.events) if not block.is_old}
        return (block for block in known.values() if block.died <= self._ended)

    def _graph_growth(self) -> GraphGrowth | None:
        main = self._steps.main
        if main is None or main.count < _FEWEST or self._steps.accumulates(main):
            return None
        self._histories.append((self._steps.count + 1, count_graph_nodes(self._since)))
        known = {path for _, histories in self._histories for path in histories.nodes}
        per_step, path = max(((self._nodes_per_step(path), path) for path in known), default=(0.0, ""))
        if not per_step:
            return None
        return GraphGrowth(
            nodes_per_iteration=round(per_step * self._steps.count / main.count),
            iterations_count=main.count,
            holder=path,
            fix=graph_fix(
                path,
                is_collection=any(path in histories.collections for _, histories in self._histories),
                is_number=any(path in histories.numbers for _, histories in self._histories),
            ),
        )

    def _nodes_per_step(self, path: str) -> float:
        """0 where a graph does not grow from look to look: one step's own is always there, and some are cut off at times."""
        main = self._steps.main
        looks = [(at, histories.nodes.get(path, 0)) for at, histories in self._histories]
        if not looks[-1][1] and "() local " in path:
            looks.pop()  # the function has returned
        while looks and not looks[0][1]:
            looks.pop(0)
        if main is None or not looks or looks[-1][1] <= 2 * main.nodes_per_step:
            return 0
        if len(looks) == 1:
            return looks[0][1] / (looks[0][0] - 1) if main.usual_bytes >= _LEAST_NODE_BYTES else 0
        rates = [(many - few) / (later - earlier) for (earlier, few), (later, many) in pairwise(looks)]
        mean = (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])
        return mean if min(rates) > mean / 2 else 0


def _by_holder(named: Sequence[tuple[Leak, str]]) -> list[list[tuple[Leak, str]]]:
    """What several lines make for the same variable, together."""
    found: dict[str, list[tuple[Leak, str]]] = defaultdict(list)
    for one in named:
        found[collection(one[1])].append(one)
    return list(found.values())


def _kept_bytes(named: Iterable[tuple[Leak, str]]) -> int:
    """In all iterations: what is kept once an epoch is less than what is kept at each step of it, if it is not larger by as much."""
    return sum(leak.bytes_per_iteration * leak.iterations_count for leak, _ in named)
