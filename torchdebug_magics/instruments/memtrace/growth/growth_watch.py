"""Watches a loop for growth while it runs, as what a function keeps is gone when the cell is over; and tells what of it leaks."""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median_low
from typing import TypeAlias

import torch
from torch._C._autograd import _profiler_enabled

from torchdebug_magics.instruments.memtrace.growth.graph_watch import LOOKS_AT, GraphWatch
from torchdebug_magics.instruments.memtrace.growth.line_growth import LEAST_BYTES, Leak, Tally, leaking, place_of, repeated
from torchdebug_magics.instruments.memtrace.growth.loop_steps import NOISE_BYTES, Loop, Steps
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers, KeepingLines
from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, cleared_where_read, fix, of_gradients
from torchdebug_magics.instruments.memtrace.held.process_growth import ProcessGrowth, larger
from torchdebug_magics.instruments.memtrace.held.reference_cycles import CycleWatch
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block, Ledger, Place, Places, size_of
from torchdebug_magics.instruments.memtrace.ledger.op_tracer import Census, has_graph
from torchdebug_magics.instruments.memtrace.trace import GRADIENT, OPTIMIZER_STATE, PARAMETER, GraphGrowth, Growth
from torchdebug_magics.memory.found import History, find_holders
from torchdebug_magics.memory.objects import addresses_of
from torchdebug_magics.memory.paths import NOWHERE, HolderPath
from torchdebug_magics.probing.source.syntax import FUNCTIONS, enclosing, mentions, nodes, tree_of
from torchdebug_magics.report import Location

LARGE_BYTES = 1 << 10
_LARGE_PART = 0.25
"""What is less than both, an iteration and in all, is data that one wants to keep."""
_STEPS_A_STAGE = 2
"""From so many on, a part that a model gets, or a model, belongs to a stage, and not to an iteration."""
_BOUNDED = frozenset({"['old_dirs']", "['old_stps']", "['ro']"})
"""The history of L-BFGS, which has a limit."""
_FEWEST = 3
"""Runs from which one may speak of growth: a variable that is bound anew, and another that keeps its last value, hold two."""
Run: TypeAlias = Mapping[str, tuple[int, int]]
"""(blocks, bytes) that a run has left with each holder."""
_MAKES_CONSTANT = re.compile(r"= (?:torch\.)?(?:zeros|ones|tensor|empty|full)\(")
_MOST_AGAIN = 24
"""Steps followed at once, to see what is kept only at times made."""
_MORE_PATIENT = 8


def worst(
    leaks: Sequence[Leak], graph: GraphGrowth | None, keepers: Keepers, steps: Steps, peak_bytes: int, lines: KeepingLines
) -> Growth | None:
    """The growth of whoever keeps most; `peak_bytes` is what it is measured by. None where all of them are little."""
    if any(leak.role == PARAMETER for leak in leaks):  # what optimizers keep for them follows from them
        leaks = [leak for leak in leaks if leak.role not in {OPTIMIZER_STATE, GRADIENT}]
    by_holder: dict[str, list[Leak]] = defaultdict(list)
    for leak in leaks:
        by_holder[leak.path.collection].append(leak)
    most = max(by_holder.values(), key=_kept_bytes, default=[])
    if not most:
        return None
    keeps_graph = _keeps_graph(most, graph) or any(keepers.have_history(leak.blocks) and not steps.is_training(leak.loop) for leak in most)
    # What is in a graph, or made with one, shows where the graph is kept; with it, inputs are kept that may be larger.
    first = max([leak for leak in most if keeps_graph and leak.keeps_graph] or most, key=lambda leak: leak.bytes_per_iteration)
    path = first.path
    place = place_of(keepers.beside(path)) or first.place if keeps_graph and not first.keeps_graph else first.place
    size_bytes = round(_kept_bytes(most) / max(1, first.iterations_count))
    is_little = size_bytes < LARGE_BYTES and size_bytes * first.iterations_count < _LARGE_PART * peak_bytes
    if size_bytes < LEAST_BYTES or (is_little and not keeps_graph):
        return None
    owner = keepers.owner(path)
    swelling = next((leak for leak in most if leak.swells), None)
    kept_at = lines.of(path, owner, adds_up=swelling is not None or not path.place)
    # A graph that is less than the data beside it is not what is to be cut.
    alive = [block for leak in most for block in leak.blocks if not block.died]
    in_graph = size_of(block for block in alive if keepers.of(block).in_graph)
    keeps_graph = keeps_graph and (2 * in_graph >= size_of(alive) or not steps.is_training(first.loop))
    cause = Cause(
        keeps_graph=keeps_graph,
        trains=steps.is_training(first.loop),
        trains_later=not steps.is_training(first.loop) and _trains_on(path.root, kept_at),
        swells=swelling is not None,
        dim=None if swelling is None else swelling.dim,
        slices=keepers.are_slices(first.blocks),
        line="" if kept_at is None else kept_at.source,
        is_attribute=owner is not None and path.pieces[-1:] == (f".{owner.attribute}",) and bool(path.place),
        empties="" if owner is None else owner.empties,
    )
    others = {leak.path.collection for leak in leaks if leak.path and leak.bytes_per_iteration >= LEAST_BYTES} - {path.collection}
    anew = lines.hooked_anew() if path.through_hook else None
    how, edits = cleared_where_read(path, kept_at) if swelling is None and not keeps_graph else ("", ())
    kept_at, how, edits = anew or (kept_at, how or fix(path, cause), edits)
    return Growth(
        bytes_per_iteration=size_bytes,
        iterations_count=first.iterations_count,
        location=None if place is None else place.location,
        holder=str(path),
        variable=path.variable,
        fix=how,
        edits=edits,
        fix_state="compiles" if edits else "advice",
        keeps_graph=keeps_graph,
        others=tuple(sorted(others)),
        kept_at=kept_at,
        frees_bytes=0 if anew else keepers.frees_bytes(path, graphs=keeps_graph),
    )


def _trains_on(name: str, where: Location | None) -> bool:
    """Whether the function or cell around a line calls backward() on a variable, or on what is computed from it."""
    tree = None if where is None else tree_of(where.file)
    functions = [node for node in enclosing(tree, where.line) if isinstance(node, FUNCTIONS)] if where is not None else []
    names = {name}
    for node in nodes(ast.AST, functions[-1] if functions else tree):
        if isinstance(node, ast.Assign) and mentions(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and node.attr == "backward" and mentions(node.value, names):
            return True
    return False


def _keeps_graph(leaks: Sequence[Leak], graph: GraphGrowth | None) -> bool:
    """By the path through it, or because that variable's graph grows; without a name, by what it was made for."""
    if not any(leak.path for leak in leaks):
        return any(leak.keeps_graph for leak in leaks)
    return any(leak.path.through_graph or (graph is not None and leak.path.startswith(graph.holder)) for leak in leaks)


def _kept_bytes(leaks: Iterable[Leak]) -> int:
    """In all iterations: what is kept once an epoch is less than what is kept at each step of it, if it is not larger by as much."""
    return sum(leak.bytes_per_iteration * leak.iterations_count for leak in leaks)


def unintended(leaks: Sequence[Leak], keepers: Keepers, steps: Steps, *, graph: str, plain: Collection[Place]) -> list[Leak]:
    """Those that nobody wants.

    `graph` is the variable with a graph that grows; `plain` are the lines whose tensors had none when it was looked who holds them.
    """
    leaks = [leak for leak in leaks if _BOUNDED.isdisjoint(leak.path.pieces)]
    # What an episode keeps is let go when its only backward pass has run.
    leaks = [leak for leak in leaks if leak.loop is None or not (leak.keeps_graph and steps.accumulates(leak.loop))]
    meant = [leak for leak in leaks if leak.role == PARAMETER and _is_of_a_stage(leak)]
    also = {OPTIMIZER_STATE, GRADIENT} if meant else set()
    leaks = [leak for leak in leaks if leak not in meant and leak.role not in also]
    with_graph = {leak.path.collection for leak in leaks if leak.path.through_graph or (graph and leak.path.startswith(graph))}
    return [leak for leak in leaks if leak.path.collection in with_graph or not _is_result(leak, keepers, steps, plain)]


def _is_of_a_stage(leak: Leak) -> bool:
    """Whether it is a part that a model gets at times, or models of which each is trained for itself."""
    made = {block.iteration for block in leak.blocks}
    in_stages = max(made) - min(made) >= _STEPS_A_STAGE * (len(made) - 1)
    return in_stages and (not leak.path.inside or all(block.is_called for block in leak.blocks if not block.died))


def _is_result(leak: Leak, keepers: Keepers, steps: Steps, plain: Collection[Place]) -> bool:
    """Whether it is what a loop was for: nothing is trained in it, and a variable simply holds it, without a graph.

    If the cell has died of it, it is not.
    """
    if steps.is_training(leak.loop, leaves=True):
        return False
    if all(block.died for block in leak.blocks):  # whoever kept it has returned by now
        return not leak.keeps_graph or leak.place in plain
    if keepers.has_error or not leak.path.in_variable or keepers.have_history(leak.blocks):
        return False
    if leak.swells:  # the keys and values of the text so far: the model itself adds to them, and is given them again
        return all(block.span.phase == "forward" for block in leak.blocks)
    # What was made inside of a model and not returned by it, a hook puts there.
    of_loop = all(block.is_returned or block.place is None or block.span.phase != "forward" for block in leak.blocks)
    return of_loop and not leak.path.through_cache and not keepers.are_slices(leak.blocks)


def rerun_growth(runs: deque[Run], made: Sequence[Block], keepers: Keepers, alive: Sequence[Block], *, trains: bool) -> Growth | None:
    """What grows from run to run of this cell; `runs` are those before it, the earliest first, and this one is added."""
    left = keepers.by_holder(made)
    runs.append({name: (len(blocks), size_of(blocks)) for name, blocks in left.items()})
    wanted = {name: sum(run[name][0] for run in runs) for name in left if len(runs) >= _FEWEST and all(name in run for run in runs)}
    if not wanted:
        return None
    keepers = Keepers(alive)
    held = keepers.by_holder(alive)
    sizes = {name: median_low(run[name][1] for run in runs) for name in wanted if len(held.get(name, ())) >= wanted[name]}
    most = max(sizes, key=lambda name: sizes[name], default="")
    if not most or not sizes[most]:
        return None
    path, place = keepers.of(held[most][0]).path, place_of(left[most])
    return Growth(
        bytes_per_iteration=sum(sizes.values()),
        iterations_count=len(runs),
        location=None if place is None else place.location,
        holder=most,
        variable=path.variable,
        fix=fix(path, Cause(keeps_graph=path.through_graph, trains=trains)),
        keeps_graph=path.through_graph,
        frees_bytes=keepers.frees_bytes(path, graphs=False),
    )


class GrowthWatch:
    """Of one cell."""

    def __init__(self, ledger: Ledger, steps: Steps, places: Places, cycles: CycleWatch, is_recorded: Callable[[], bool]) -> None:
        self._ledger = ledger
        self._is_recorded = is_recorded
        self._cycles = cycles
        self.process = ProcessGrowth(ledger)
        self._places = places
        self.steps = steps
        self._paths: dict[Place, HolderPath] = {}
        """Who held what seemed to grow, while the loop ran."""
        self._plain: set[Place] = set()
        """Lines of which what was kept had no graph, while the loop ran."""
        self.graphs = GraphWatch()
        self._weighed = 0, 0, 0
        """(step, bytes in the ledger, bytes of the heap) when it was weighed last what variables hold."""
        self._patience = 1
        self._tally = Tally()
        self.carried: set[str] = set()
        """Variables with a history that are given to the model again."""
        self.collects = ""
        """The variable that holds the results of the loop: it grows, and that is no leak."""
        self.creates_graphs_at: Place | None = None
        """The line of a backward pass that leaves its graph in the gradients."""
        self._ended = 0
        """Events until the end of the cell."""

    def begins(self, adopt: Callable[[Census], None]) -> None:
        """A step begins; `adopt` takes what was made unseen into the ledger."""
        if self.steps.count not in LOOKS_AT:
            return
        if _profiler_enabled():  # it would record each of our calls, and keep more than the cell does
            self.process.look(self.steps.count)
            return
        leaks = [leak for leak in leaking(self._ledger.live.values(), self.steps) if leak.place not in self._paths]
        if leaks:
            keepers = Keepers((block for leak in leaks for block in leak.blocks), carried=self.carried)
            for leak in leaks:
                holdings = [keepers.of(block) for block in leak.blocks if not block.died]
                if leak.place is not None and all(holding.path and not holding.in_graph for holding in holdings):
                    self._plain.add(leak.place)
                if leak.place is not None and (path := keepers.path(leak.blocks)):
                    self._paths[leak.place] = path
        self.graphs.look(self.steps, is_recorded=self._is_recorded())
        main = self.steps.main
        if main is not None and self._has_grown(main):
            adopt(Census())
            self._was_weighed(main)
            made = [block for block in self._ledger.live.values() if not block.is_old]
            self._tally.weigh(self.steps.count, made, Keepers(made))
            each = self._tally.steps_each()
            if each:
                self.steps.again(min(_MOST_AGAIN, round(each) + 1))
            if self._ledger.total.now_bytes >= self._ledger.rises_at_bytes:
                self._cycles.look()
        self.process.look(self.steps.count)

    def is_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """To the model whose call has begun the step: what has a history is from the steps before."""
        if self.steps.count in LOOKS_AT:
            addresses = [address for tensor in tensors if has_graph(tensor) for address in addresses_of(tensor)]
            holdings = find_holders(addresses).holdings if addresses else {}
            self.carried.update(holding.root for holding in holdings.values())

    def _has_grown(self, loop: Loop) -> bool:
        """Whether the ledger has, or the heap in steps that nobody followed, by more than noise since variables were weighed last."""
        steps, *grown = (now - then for then, now in zip(self._weighed, self._weighs(loop), strict=True))
        least = max(LARGE_BYTES * steps, NOISE_BYTES)
        return grown[0] >= least or grown[1] >= self._patience * least

    def _weighs(self, loop: Loop) -> tuple[int, int, int]:
        return self.steps.count, self._ledger.total.now_bytes, loop.heap[-1]

    def _was_weighed(self, loop: Loop) -> None:
        """Where no tensors account for most of it, as where another watch keeps a record, the heap is looked at ever more rarely."""
        before, self._weighed = self._weighed, self._weighs(loop)
        _, in_tensors, in_heap = (now - then for then, now in zip(before, self._weighed, strict=True))
        self._patience *= _MORE_PATIENT if before[0] and 2 * in_tensors < in_heap else 1

    def ends(self) -> None:
        """The cell is over; what only the collector finds from here on, nobody kept."""
        self._ended = self._ledger.clock

    def found(self, made: Sequence[Block], keepers: Keepers, peak_bytes: int) -> tuple[Growth | None, GraphGrowth | None]:
        """What grew until the last step; `made` is what is still there, `peak_bytes` what it is measured by."""
        graph = self.graphs.growth(self.steps, self._line_of)
        if self.steps.count:
            named = self._unintended(made, keepers, graph)
        else:
            named = [replace(leak, path=keepers.path(leak.blocks)) for leak in repeated(made)]
            # Where no model is called, a list of tensors is what was wanted; a graph, a hook and a cache are kept unseen.
            named = [leak for leak in named if leak.path.through_graph or leak.path.through_hook or leak.path.is_hidden]
        growth = worst(named, graph, keepers, self.steps, peak_bytes, self.lines)
        if growth is not None and self.creates_graphs_at is not None and not growth.holder:
            # A cycle in C++, which no collector sees: the leaf holds its gradient, and that the graph that leads to the leaf.
            growth = replace(growth, kept_at=self.creates_graphs_at.location, fix=of_gradients(), keeps_graph=True)
        return larger(growth, self.process.found(self.steps, self.lines)), graph

    @cached_property
    def lines(self) -> KeepingLines:
        """Of the code that has run."""
        return KeepingLines(self._places.files)

    def _line_of(self, path: HolderPath, history: History) -> Location | None:
        """Where a variable is given the graph that it keeps."""
        kept_at = self.lines.of(path, history.owner, adds_up=not history.is_collection)
        made, _ = (self._places.nodes.of(history.latest) if kept_at is None else None) or (None, "")
        # A tensor that is written in place grows where that is done, and not where it was made and put into something.
        is_new = kept_at is not None and _MAKES_CONSTANT.search(kept_at.source) is not None
        return (self.lines.only_addition() if is_new else None) or (kept_at if made is None else made.location)

    def _unintended(self, made: Sequence[Block], keepers: Keepers, graph: GraphGrowth | None) -> list[Leak]:
        leaks = leaking(self._followed(made), self.steps, is_over=True)
        leaks = [leak for leak in leaks if leak.keeps_graph or not any(keepers.of(block).is_bounded for block in leak.blocks)]
        named = [leak for leak in (self._named(leak, keepers) for leak in leaks) if not leak.path.is_made_once]
        named += self._at_times(made, keepers, named)
        leaks = unintended(named, keepers, self.steps, graph="" if graph is None else graph.holder, plain=self._plain)
        known = {leak.path for leak in leaks}
        self.collects = next((leak.path.collection for leak in named if leak.path not in known and leak.path.in_variable), "")
        return leaks

    def _named(self, leak: Leak, keepers: Keepers) -> Leak:
        """As the user knows it: after an error its traceback holds all, and the name of a running call is gone with the call."""
        then = NOWHERE if leak.place is None else self._paths.get(leak.place, NOWHERE)
        now = keepers.path(leak.blocks)
        alive = [block for block in leak.blocks if not block.died]
        held = (block for block in alive if keepers.of(block).path.collection == now.collection)
        # What was in a list of its own then may be in a list of such lists by now.
        is_now = now and not keepers.has_error and (then.function or 2 * size_of(held) > size_of(alive))
        return replace(leak, path=now if is_now else then or now)

    def _at_times(self, made: Sequence[Block], keepers: Keepers, known: Sequence[Leak]) -> list[Leak]:
        """What only some calls leave behind; without what is known to grow, which a call that has returned may have named otherwise."""
        main = self.steps.main
        if main is None:
            return []
        self._tally.weigh(self.steps.count + 1, made, keepers)
        names, blocks = {leak.path.collection for leak in known}, {id(block) for leak in known for block in leak.blocks}
        found = [leak for leak in self._tally.growing(main) if leak.path.collection not in names]
        return [leak for leak in found if blocks.isdisjoint(map(id, leak.blocks))]

    def _followed(self, made: Sequence[Block]) -> Iterable[Block]:
        """With those that are gone by now: a function that held them may have returned, and how long they lived tells of windows."""
        known = {id(block): block for block in (*made, *self._ledger.events) if not block.is_old}
        return (block for block in known.values() if block.died <= self._ended)
