"""Of all that grows, what is told: the variable that keeps most, the line, and what to change."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.memtrace.findings import Growth
from torchdebug_magics.instruments.memtrace.growth.holder_weights import place_of
from torchdebug_magics.instruments.memtrace.growth.line_growth import LEAST_BYTES
from torchdebug_magics.instruments.memtrace.held.fixes import Cause, collection, emptied, fix, is_in_collection, root
from torchdebug_magics.instruments.memtrace.ledger.memory_census import GRADIENT, OPTIMIZER_STATE, PARAMETER
from torchdebug_magics.probing.source.call_sites import enclosing, tree_of

if TYPE_CHECKING:
    from torchdebug_magics.instruments.memtrace.findings import GraphGrowth
    from torchdebug_magics.instruments.memtrace.growth.line_growth import Leak
    from torchdebug_magics.instruments.memtrace.growth.loop_steps import Steps
    from torchdebug_magics.instruments.memtrace.held.keepers import Keepers
    from torchdebug_magics.instruments.memtrace.held.keeping_lines import KeepingLines
    from torchdebug_magics.report import Location

__all__ = ["LARGE_BYTES", "worst"]

LARGE_BYTES = 1 << 10
_LARGE_PART = 0.25
"""What is less than both, an iteration and in all, is data that one wants to keep."""


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
    around = [] if tree is None or where is None else [tree, *enclosing(tree, where.line)]
    functions = [one for one in around if isinstance(one, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef))]
    names = {name}
    for node in ast.walk(functions[-1]) if functions else ():
        if isinstance(node, ast.Assign) and _reads(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and node.attr == "backward" and _reads(node.value, names):
            return True
    return False


def _reads(node: ast.expr, names: set[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in names for one in ast.walk(node))


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
