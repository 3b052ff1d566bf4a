"""How long the histories are that named variables hold: ``total += loss`` makes one longer at each step, and keeps no tensor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.holders.containers import CONTAINERS
from torchdebug_magics.probing.holders.outside import is_a, of_type
from torchdebug_magics.probing.holders.paths import Paths
from torchdebug_magics.probing.holders.roots import Rank, roots
from torchdebug_magics.probing.holders.tensors import history_of, is_node, next_nodes
from torchdebug_magics.probing.holders.walk import Walk, undisturbed

__all__ = ["Histories", "count_graph_nodes"]

_STEPS = 3
_MOST_OBJECTS, _MOST_NODES, _MOST_NAMES = 30_000, 30_000, 50
"""Of all graphs together: see `probing.graphs`."""


@dataclass(frozen=True, kw_only=True)
class Histories:
    """How many nodes lie behind what variables hold."""

    nodes: dict[str, int]
    """By the path of a variable, or of the collection in one, such as ``total`` or ``trainer.losses``."""
    collections: frozenset[str]
    """Those of these paths that are a collection's."""
    numbers: frozenset[str]
    """Those that are a tensor's with a single number."""


def count_graph_nodes(since: int = 0) -> Histories:
    """The histories of all that is named.

    Only nodes with a sequence number from `since` on are counted: what was made earlier leads to nothing later. A node that lies
    behind two of the paths counts for both; what is not reached within the budget is left out.
    """
    with undisturbed(), ExitStack() as stack:
        starts = [root for root in roots() if root.rank not in {Rank.ERROR, Rank.DEBUGGER, Rank.IN_FLIGHT}]
        walk = stack.enter_context(closing(Walk(starts, (), _MOST_OBJECTS, enters=lambda kind: not is_node(kind), most_steps=_STEPS)))
        groups: dict[int, list[Any]] = {}
        for number, held in enumerate(walk.objects):
            if is_a(type(held), torch.Tensor) and (node := history_of(held)) is not None:
                groups.setdefault(_collection(walk, number), []).append(node)
        counts, collections, numbers = dict[str, int](), set[str](), set[str]()
        ways, left = Paths(walk), _MOST_NODES
        for number, nodes in list(groups.items())[:_MOST_NAMES]:
            path = ways.to(number)
            counts[path] = found = _count(nodes, left, since)
            left -= found
            if of_type(CONTAINERS, type(walk.objects[number])) is not None:
                collections.add(path)
            elif not torch._C.TensorBase.dim(walk.objects[number]):
                numbers.add(path)
        return Histories(nodes=counts, collections=frozenset(collections), numbers=frozenset(numbers))


def _collection(walk: Walk, number: int) -> int:
    """The outermost collection that it is in, as the places in it change from step to step; itself where it is in none."""
    holder = walk.first[number]
    while holder >= 0 and of_type(CONTAINERS, type(walk.objects[holder])) is not None and not _is_attributes(walk, holder):
        number, holder = holder, walk.first[holder]
    return number


def _is_attributes(walk: Walk, number: int) -> bool:
    owner = walk.first[number]
    return owner >= 0 and type(walk.objects[number]) is dict and attributes_of(walk.objects[owner]) is walk.objects[number]


def _count(nodes: Iterable[Any], most: int, since: int) -> int:
    todo = [node for node in nodes if _number(node) >= since]
    seen = {id(node): node for node in todo}  # held, as the id of a wrapper that is gone may be another's
    while todo and len(seen) < most:
        for node in next_nodes(todo.pop()):
            if id(node) not in seen and _number(node) >= since:
                seen[id(node)] = node
                todo.append(node)
    return len(seen)


def _number(node: Any) -> int:
    """The nodes of a thread are numbered as they are made; those that collect a leaf's gradient have the highest number there is."""
    number: int = node._sequence_nr()
    return number
