"""Of all that grows, what is told: the variable that keeps most, the line, and what to change."""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import TypeAlias

from torchdebug_magics.instruments.memtrace.findings import GraphGrowth, Growth
from torchdebug_magics.instruments.memtrace.growth.line_growth import LEAST_BYTES, Leak, place_of
from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
from torchdebug_magics.instruments.memtrace.held.keepers import Keepers, KeepingLines
from torchdebug_magics.instruments.memtrace.held.leak_fixes import Cause, collection, emptied, fix, is_in_collection, is_part, root
from torchdebug_magics.instruments.memtrace.ledger.blocks import Block
from torchdebug_magics.instruments.memtrace.ledger.phases import GRADIENT, OPTIMIZER_STATE, PARAMETER, Place
from torchdebug_magics.probing.syntax import FUNCTIONS, enclosing, mentions, nodes, tree_of
from torchdebug_magics.report import Location

LARGE_BYTES = 1 << 10
_LARGE_PART = 0.25
"""What is less than both, an iteration and in all, is data that one wants to keep."""
_STEPS_A_STAGE = 2
"""From so many on, a part that a model gets, or a model, belongs to a stage, and not to an iteration."""
_BOUNDED = ("['old_dirs']", "['old_stps']", "['ro']")
"""The history of L-BFGS, which has a limit."""
_IN_A_VARIABLE = re.compile(r"(?:\w+\(\) local ')?\w+'?(?:\[[^\]]*\]|\{\.\.\.\})+(?:\.base)*$")
"""Such as ``outs[0]``, and not an attribute, what a function closes over, or a graph."""
_FEWEST = 3
"""Runs from which one may speak of growth: a variable that is bound anew, and another that keeps its last value, hold two."""
Run: TypeAlias = Mapping[str, tuple[int, int]]
"""(blocks, bytes) that a run has left with each holder."""


def worst(
    named: Sequence[tuple[Leak, str]], graph: GraphGrowth | None, keepers: Keepers, steps: Steps, peak_bytes: int, lines: KeepingLines
) -> Growth | None:
    """Of leaks with their paths; `peak_bytes` is what they are measured by. None where all of them are little."""
    if any(leak.role == PARAMETER for leak, _ in named):  # what optimizers keep for them follows from them
        named = [one for one in named if one[0].role not in {OPTIMIZER_STATE, GRADIENT}]
    most = max(_by_holder(named), key=_kept_bytes, default=[])
    if not most:
        return None
    keeps_graph = _keeps_graph(most, graph) or any(
        keepers.have_history(leak.blocks) and not steps.is_training(leak.loop) for leak, _ in most
    )
    # What is in a graph, or made with one, shows where the graph is kept; with it, inputs are kept that may be larger.
    shown = [one for one in most if keeps_graph and one[0].keeps_graph] or most
    first, path = max(shown, key=lambda one: one[0].bytes_per_iteration)
    place = place_of(keepers.beside(path)) or first.place if keeps_graph and not first.keeps_graph else first.place
    size_bytes = round(_kept_bytes(most) / max(1, first.iterations_count))
    is_little = size_bytes < LARGE_BYTES and size_bytes * first.iterations_count < _LARGE_PART * peak_bytes
    if size_bytes < LEAST_BYTES or (is_little and not keeps_graph):
        return None
    owner = keepers.owner(path)
    swelling = next((leak for leak, _ in most if leak.swells), None)
    kept_at = lines.of(path, owner, adds_up=swelling is not None or not is_in_collection(path))
    # A graph that is less than the data beside it is not what is to be cut.
    in_graph, beside = keepers.by_graph(leak.blocks for leak, _ in most)
    keeps_graph = keeps_graph and (in_graph >= beside or not steps.is_training(first.loop))
    cause = Cause(
        keeps_graph=keeps_graph,
        trains=steps.is_training(first.loop),
        trains_later=not steps.is_training(first.loop) and _trains_on(root(path), kept_at),
        swells=swelling is not None,
        dim=None if swelling is None else swelling.dim,
        slices=keepers.are_slices(first.blocks),
        line="" if kept_at is None else kept_at.source,
        is_attribute=owner is not None and path.endswith(f".{owner.attribute}") and is_in_collection(path),
        empties=emptied(owner),
    )
    others = {collection(other) for leak, other in named if other and leak.bytes_per_iteration >= LEAST_BYTES} - {collection(path)}
    return Growth(
        bytes_per_iteration=size_bytes,
        iterations_count=first.iterations_count,
        location=None if place is None else place.location,
        holder=path,
        fix=fix(path, cause),
        keeps_graph=keeps_graph,
        others=tuple(sorted(others)),
        kept_at=kept_at,
        frees_bytes=keepers.frees_bytes(path, graphs=keeps_graph),
    )


def _trains_on(name: str, where: Location | None) -> bool:
    """Whether the function or cell around a line calls backward() on a variable, or on what is computed from it."""
    tree = None if where is None else tree_of(where.file)
    functions = [one for one in enclosing(tree, where.line) if isinstance(one, FUNCTIONS)] if where is not None else []
    names = {name}
    for node in nodes(ast.AST, functions[-1] if functions else tree):
        if isinstance(node, ast.Assign) and mentions(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and node.attr == "backward" and mentions(node.value, names):
            return True
    return False


def _keeps_graph(named: Sequence[tuple[Leak, str]], graph: GraphGrowth | None) -> bool:
    """By the path through it, or because that variable's graph grows; without a name, by what it was made for."""
    if not any(path for _, path in named):
        return any(leak.keeps_graph for leak, _ in named)
    return any("grad_fn" in path or (graph is not None and path.startswith(graph.holder)) for _, path in named)


def _by_holder(named: Sequence[tuple[Leak, str]]) -> list[list[tuple[Leak, str]]]:
    """What several lines make for the same variable, together."""
    found: dict[str, list[tuple[Leak, str]]] = defaultdict(list)
    for one in named:
        found[collection(one[1])].append(one)
    return list(found.values())


def _kept_bytes(named: Iterable[tuple[Leak, str]]) -> int:
    """In all iterations: what is kept once an epoch is less than what is kept at each step of it, if it is not larger by as much."""
    return sum(leak.bytes_per_iteration * leak.iterations_count for leak, _ in named)


def unintended(
    named: Sequence[tuple[Leak, str]], keepers: Keepers, steps: Steps, *, graph: str, plain: Collection[Place]
) -> list[tuple[Leak, str]]:
    """Of leaks with their paths those that nobody wants.

    `graph` is the variable with a graph that grows; `plain` are the lines whose tensors had none when it was looked who holds them.
    """
    named = [one for one in named if not any(word in one[1] for word in _BOUNDED)]
    meant = [leak for leak, path in named if leak.role == PARAMETER and _is_of_a_stage(leak, path)]
    also = {OPTIMIZER_STATE, GRADIENT} if meant else set()
    named = [(leak, path) for leak, path in named if leak not in meant and leak.role not in also]
    with_graph = {collection(path) for _, path in named if "grad_fn" in path or (graph and path.startswith(graph))}
    return [one for one in named if collection(one[1]) in with_graph or not _is_result(*one, keepers, steps, plain)]


def _is_of_a_stage(leak: Leak, path: str) -> bool:
    """Whether it is a part that a model gets at times, or models of which each is trained for itself."""
    made = {block.iteration for block in leak.blocks}
    in_stages = max(made) - min(made) >= _STEPS_A_STAGE * (len(made) - 1)
    return in_stages and (is_part(path) or all(block.is_called for block in leak.blocks if not block.died))


def _is_result(leak: Leak, path: str, keepers: Keepers, steps: Steps, plain: Collection[Place]) -> bool:
    """Whether it is what a loop was for: nothing is trained in it, no graph is kept, and its own code keeps it, or has returned by now."""
    if steps.is_training(leak.loop, leaves=True):
        return False
    if all(block.died for block in leak.blocks):
        return not leak.keeps_graph or leak.place in plain
    return _is_fed_back(leak, path, keepers) if leak.swells else is_collected(path, leak.blocks, keepers)


def _is_fed_back(leak: Leak, path: str, keepers: Keepers) -> bool:
    """Whether the model itself adds to it, and is given it again: the keys and values of the text so far."""
    in_forward = all(block.span.phase == "forward" for block in leak.blocks)
    return in_forward and _IN_A_VARIABLE.match(path) is not None and not keepers.has_error and not keepers.have_history(leak.blocks)


def collected_in(named: Iterable[tuple[Leak, str]], told: Iterable[tuple[Leak, str]]) -> str:
    """The variable that holds the results of a loop: of what grows, and is not told as a leak."""
    leaks = [path for _, path in told]
    return next((collection(path) for _, path in named if path not in leaks and _IN_A_VARIABLE.match(path) is not None), "")


def is_collected(path: str, blocks: Iterable[Block], keepers: Keepers) -> bool:
    """Whether a variable simply holds whole tensors, without a graph: what it was made for, unless the cell has died of it."""
    if keepers.has_error or "cache" in path.lower() or _IN_A_VARIABLE.match(path) is None:
        return False
    blocks = list(blocks)
    of_loop = all(
        block.is_returned or block.place is None or block.span.phase != "forward" for block in blocks
    )  # else a hook puts it there
    return of_loop and not (keepers.are_slices(blocks) or keepers.have_history(blocks))


def rerun_growth(runs: deque[Run], made: Sequence[Block], keepers: Keepers, alive: Sequence[Block], *, trains: bool) -> Growth | None:
    """What grows from run to run of this cell; `runs` are those before it, the earliest first, and this one is added."""
    left = _blocks_by_holder(made, keepers)
    runs.append({name: (len(blocks), sum(block.bytes for block in blocks)) for name, blocks in left.items()})
    wanted = {name: sum(run[name][0] for run in runs) for name in left if len(runs) >= _FEWEST and all(name in run for run in runs)}
    if not wanted:
        return None
    keepers = Keepers(alive)
    held = _blocks_by_holder(alive, keepers)
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
        fix=fix(path, Cause(keeps_graph="grad_fn" in path, trains=trains)),
        keeps_graph="grad_fn" in path,
        frees_bytes=keepers.frees_bytes(path, graphs=False),
    )


def _blocks_by_holder(blocks: Sequence[Block], keepers: Keepers) -> dict[str, list[Block]]:
    """Those that a variable leads to, by what of it they are in."""
    found: dict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        if keepers.of(block):
            found[collection(keepers.of(block))].append(block)
    return found
