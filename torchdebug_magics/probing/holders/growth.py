"""How long the histories are that named variables hold: ``total += loss`` makes one longer at each step, and keeps no tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.graphs import MOST_NODES
from torchdebug_magics.probing.holders.containers import CONTAINERS
from torchdebug_magics.probing.holders.outside import is_a, names_of_type, of_type
from torchdebug_magics.probing.holders.owners import Owner, owner_of
from torchdebug_magics.probing.holders.paths import Paths
from torchdebug_magics.probing.holders.roots import Rank, roots
from torchdebug_magics.probing.holders.tensor_holders import history_of, is_node, is_used_up, next_nodes
from torchdebug_magics.probing.holders.walk import Walk, undisturbed

__all__ = ["History", "histories"]

_STEPS = 5
_MOST_OBJECTS, _MOST_NODES, _MOST_NAMES = 30_000, 30_000, 50
"""Of all graphs together: see `probing.graphs`."""
_MOST_ASKED = 20
"""Nodes of one step that are asked whether they were let go."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The nodes that lie behind what one variable holds."""

    steps: Mapping[int, int]
    """How many of them were made in each step."""
    used_up: frozenset[int]
    """The steps of which a backward pass has let go what its nodes had saved: no other can run through them."""
    is_whole: bool
    """False where there were more nodes than may be looked at."""
    is_collection: bool
    """Whether it is that of a list or the like, and not of one tensor."""
    is_number: bool
    """Whether it is that of tensors with a single number each."""
    begins_anew: bool
    """Whether all that it leads to are tensors that the user has made to require a gradient, and no parameters of a module."""
    owner: Owner | None
    latest: int
    """The sequence number of the node that was made last."""

    @property
    def count(self) -> int:
        """All of the nodes."""
        return sum(self.steps.values())


def histories(step_of: Callable[[int], int]) -> dict[str, History]:
    """By the path of a variable, or of the collection in one, such as ``total`` or ``trainer.losses``: the history of all that is named.

    `step_of` tells the step from the sequence number of a node; what was made in none, 0, is not counted, as what was made earlier leads
    to nothing later. A node that lies behind two of the paths counts for both; what is not reached within the budget is left out.
    """
    with undisturbed(), ExitStack() as stack:
        starts = [root for root in roots() if root.rank not in {Rank.ERROR, Rank.DEBUGGER, Rank.IN_FLIGHT}]
        walk = stack.enter_context(closing(Walk(starts, (), _MOST_OBJECTS, enters=lambda kind: not is_node(kind), most_steps=_STEPS)))
        groups: dict[int, list[Any]] = {}
        larger = set[int]()
        for number, held in enumerate(walk.objects):
            if is_a(type(held), torch.Tensor) and (node := history_of(held)) is not None:
                group = _collection(walk, number)
                groups.setdefault(group, []).append(node)
                if torch._C.TensorBase.dim(held):
                    larger.add(group)
        ways, left, found = Paths(walk), _MOST_NODES, {}
        for number, nodes in list(groups.items())[:_MOST_NAMES]:
            holder = walk.objects[number]
            history = _history(
                nodes,
                step_of,
                min(left, MOST_NODES),
                is_collection=of_type(CONTAINERS, type(holder)) is not None,
                is_number=number not in larger,
                owner=owner_of(walk, ways, number),
            )
            left -= history.count
            found[ways.to(number)] = history
        return found


def _collection(walk: Walk, number: int) -> int:
    """The outermost collection that it is in, as the places in it change from step to step; itself where it is in none."""
    holder = walk.first[number]
    while holder >= 0 and of_type(CONTAINERS, type(walk.objects[holder])) is not None and not _is_attributes(walk, holder):
        number, holder = holder, walk.first[holder]
    return number


def _is_attributes(walk: Walk, number: int) -> bool:
    owner = walk.first[number]
    return owner >= 0 and type(walk.objects[number]) is dict and attributes_of(walk.objects[owner]) is walk.objects[number]


def _history(nodes: Iterable[Any], step_of: Callable[[int], int], most: int, **known: Any) -> History:
    todo = [node for node in nodes if step_of(_number(node))]
    seen = {id(node): node for node in todo}  # held, as the id of a wrapper that is gone may be another's
    steps, asked, used_up, latest = Counter[int](), Counter[int](), set[int](), 0
    leaves = set[bool]()
    while todo:
        node = todo.pop()
        number = _number(node)
        step, latest = step_of(number), max(latest, number)
        steps[step] += 1
        if step not in used_up and asked[step] < _MOST_ASKED:
            asked[step] += 1
            if is_used_up(node):
                used_up.add(step)
        for before in next_nodes(node):
            if "variable" in names_of_type(type(before)):
                leaves.add(is_a(type(before.variable), torch.nn.Parameter))
            if id(before) not in seen and step_of(_number(before)) and len(seen) < most:
                seen[id(before)] = before
                todo.append(before)
    return History(
        steps=steps, used_up=frozenset(used_up), is_whole=len(seen) < most, begins_anew=leaves == {False}, latest=latest, **known
    )


def _number(node: Any) -> int:
    """The nodes of a thread are numbered as they are made; those that collect a leaf's gradient have the highest number there is."""
    number: int = node._sequence_nr()
    return number
