"""Autograd graphs, walked from Python: PyTorch keeps a handle for each node that Python has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

MOST_NODES = 10_000
"""Of one graph. Handles are freed one inside the other with it, and from about 50,000 on the process crashes."""


def upstream(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes from which `roots` were computed, and those themselves, each once; of one graph at most `MOST_NODES`.

    `roots` had better be made one by one: where one graph has more, only so many nodes are asked for after it.
    """
    number_of: dict[Any, int] = {}
    counts: list[int] = []
    same_as: list[int] = []
    left = 0
    """How many nodes may follow, once a graph was too large."""

    def graph(number: int) -> int:
        while same_as[number] != number:
            same_as[number] = same_as[same_as[number]]
            number = same_as[number]
        return number

    for number, root in enumerate(roots):
        counts.append(0)
        same_as.append(number)
        todo = [root] if root is not None else []
        while todo and counts[graph(number)] < MOST_NODES and left != 1:
            left -= left > 0
            node = todo.pop()
            ends = hasattr(node, "variable")  # where a gradient is accumulated: graphs that share no more are not one
            if node in number_of:
                other, own = graph(number_of[node]), graph(number)
                if other != own and not ends:
                    same_as[other] = own
                    counts[own] += counts[other]
                continue
            number_of[node] = number
            counts[graph(number)] += not ends
            yield node
            todo += [following for following, _ in node.next_functions if following is not None]
        if left == 1:
            return
        if not left and counts[graph(number)] >= MOST_NODES:
            left = MOST_NODES


def is_graph_leaf(tensor: torch.Tensor) -> bool:
    """Whether it has no history; False for one of several views whose base was written in place, as FSDP's: PyTorch refuses to tell."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def leaves_of(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that the graph of `roots` ends in; of a graph with very many nodes, those of its last part."""
    tensors: dict[int, torch.Tensor] = {id(root): root for root in roots if root.is_leaf and root.requires_grad}
    for node in upstream(root.grad_fn for root in roots):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            tensors[id(variable)] = variable
    return list(tensors.values())
