"""Of all that grows, what is told: the variable that keeps most, the line, and what to change."""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import TypeAlias

from torchdebug_magics.instruments.memtrace.findings import GraphGrowth, Growth
from torchdebug_magics.instruments.memtrace.growth.line_growth import LEAST_BYTES, Leak, place_of
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers, KeepingLines
from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, fix
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block
from torchdebug_magics.instruments.memtrace.ledger.phases import GRADIENT, OPTIMIZER_STATE, PARAMETER, Place
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
    in_graph = sum(block.bytes for block in alive if keepers.of(block).through_graph or keepers.have_history([block]))
    keeps_graph = keeps_graph and (2 * in_graph >= sum(block.bytes for block in alive) or not steps.is_training(first.loop))
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
    return Growth(
        bytes_per_iteration=size_bytes,
        iterations_count=first.iterations_count,
        location=None if place is None else place.location,
        holder=str(path),
        variable=path.variable,
        fix=fix(path, cause),
        keeps_graph=keeps_graph,
        others=tuple(sorted(others)),
        kept_at=kept_at,
        frees_bytes=keepers.frees_bytes(path, graphs=keeps_graph),
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
    """Whether it is what a loop was for: nothing is trained in it, no graph is kept, and its own code keeps it, or has returned by now."""
    if steps.is_training(leak.loop, leaves=True):
        return False
    if all(block.died for block in leak.blocks):
        return not leak.keeps_graph or leak.place in plain
    return _is_fed_back(leak, keepers) if leak.swells else is_collected(leak, keepers)


def _is_fed_back(leak: Leak, keepers: Keepers) -> bool:
    """Whether the model itself adds to it, and is given it again: the keys and values of the text so far."""
    in_forward = all(block.span.phase == "forward" for block in leak.blocks)
    return in_forward and leak.path.in_variable and not keepers.has_error and not keepers.have_history(leak.blocks)


def collected_in(leaks: Iterable[Leak], told: Iterable[Leak]) -> str:
    """The variable that holds the results of a loop: of what grows, and is not told as a leak."""
    known = {leak.path for leak in told}
    return next((leak.path.collection for leak in leaks if leak.path not in known and leak.path.in_variable), "")


def is_collected(leak: Leak, keepers: Keepers) -> bool:
    """Whether a variable simply holds whole tensors, without a graph: what it was made for, unless the cell has died of it."""
    if keepers.has_error or leak.path.through_cache or not leak.path.in_variable:
        return False
    of_loop = all(
        block.is_returned or block.place is None or block.span.phase != "forward" for block in leak.blocks
    )  # else a hook puts it there
    return of_loop and not (keepers.are_slices(leak.blocks) or keepers.have_history(leak.blocks))


def rerun_growth(runs: deque[Run], made: Sequence[Block], keepers: Keepers, alive: Sequence[Block], *, trains: bool) -> Growth | None:
    """What grows from run to run of this cell; `runs` are those before it, the earliest first, and this one is added."""
    left = keepers.by_holder(made)
    runs.append({name: (len(blocks), sum(block.bytes for block in blocks)) for name, blocks in left.items()})
    wanted = {name: sum(run[name][0] for run in runs) for name in left if len(runs) >= _FEWEST and all(name in run for run in runs)}
    if not wanted:
        return None
    keepers = Keepers(alive)
    held = keepers.by_holder(alive)
    sizes = {name: median_low(run[name][1] for run in runs) for name in wanted if len(held.get(name, ())) >= wanted[name]}
    most = max(sizes, key=lambda name: sizes[name], default="")
    if not most or not sizes[most]:
        return None
    path, place = keepers.of(held[most][0]), place_of(left[most])
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
