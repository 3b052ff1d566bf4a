"""Autograd graphs, walked from Python: PyTorch keeps a handle for each node that Python has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import Any, Generic, TypeVar

import torch
from torch._C._autograd import _get_sequence_nr

MOST_NODES = 10_000
"""How many nodes of a graph are followed. Handles are freed one inside the other with it, and from about 50,000 on the process crashes."""
_MOST_MAKERS = 1 << 18
_MOST_OF_AN_OP = 8
MakerT = TypeVar("MakerT")


class NodeMakers(Generic[MakerT]):
    """What made each node that this thread adds to a graph: autograd numbers them one after the other."""

    def __init__(self) -> None:
        self._makers: dict[int, MakerT] = {}
        self._next, self._thread = _get_sequence_nr(), get_ident()

    def of(self, node_number: int) -> MakerT | None:
        """What made the node with that sequence number."""
        return self._makers.get(node_number)

    def has_new_node(self) -> bool:
        """Whether autograd made a node since the last call of `add`."""
        return get_ident() == self._thread and _get_sequence_nr() != self._next

    def add(self, maker: MakerT, writer: MakerT | None = None) -> None:
        """The newest node is that of `maker`, an op that runs now; the nodes before it, which ran no op of their own, are too.

        They are those of `writer` instead, the op before, where that has written in place: autograd adds a node when it has returned.
        Each thread numbers its own, so that those of autograd's threads are left out.
        """
        if get_ident() != self._thread:
            return
        number = _get_sequence_nr()
        if len(self._makers) > _MOST_MAKERS:
            self._makers.clear()
        for node in range(max(self._next, number - _MOST_OF_AN_OP), number):
            self._makers[node] = writer if writer is not None and node < number - 1 else maker
        self._next = number

    def skip(self) -> None:
        """The nodes made since the last call of `add` are nobody's; what follows is of the thread that calls."""
        self._next, self._thread = _get_sequence_nr(), get_ident()

    def keep(self, is_kept: Callable[[MakerT], bool]) -> None:
        """Forget the nodes of all other makers."""
        self._makers = {number: maker for number, maker in self._makers.items() if is_kept(maker)}


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
                reached, own = graph(number_of[node]), graph(number)
                if reached != own and not ends:
                    same_as[reached] = own
                    counts[own] += counts[reached]
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


def saved_by(node: Any, *, packed: bool = False) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors that a node has saved, by name, or why PyTorch does not hand one out; those that a hook has packed only if `packed`."""
    for name in _saved_names(node):
        if not packed and _is_packed(node, name):
            continue
        try:
            held = getattr(node, name)
        except RuntimeError as error:
            yield name, str(error)
            continue
        yield from ((name, one) for one in (held if isinstance(held, (tuple, list)) else (held,)) if isinstance(one, torch.Tensor))


def has_packed(node: Any) -> bool:
    """Whether a hook has packed what it saved, so that a look at it would run the user's code, as a checkpoint's forward."""
    return any(_is_packed(node, name) for name in _saved_names(node))


def _saved_names(node: Any) -> tuple[str, ...]:
    names = dir(type(node))
    tensors = [name.removeprefix("_raw") for name in names if name.startswith("_raw_saved_") and name.removeprefix("_raw") in names]
    return (*tensors, *(["saved_tensors"] if "saved_tensors" in names else []))


def _is_packed(node: Any, name: str) -> bool:
    try:
        raw = getattr(node, f"_raw{name}" if name.startswith("_saved") else f"_raw_{name}")
    except (AttributeError, RuntimeError):
        return False
    return any(getattr(one, "unpack_hook", None) is not None for one in (raw if isinstance(raw, (tuple, list)) else (raw,)))
