"""A loss of every output with every target: 8 x 1 against 8 broadcasts to 8 x 8, and training goes on, in the wrong direction.

Read from the graph of the loss before its backward pass, so that nothing stands in the way of the cell. Only what cannot be meant is told:
the output as it was computed, against a target that has no graph. Whoever wants all pairs writes ``a[:, None] - b``, and is left alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.format import shape

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["taken_in_pairs"]

_FARTHEST = 64
"""Nodes between the loss and the difference in it."""
_MEANT = (
    "Unsqueeze",
    "View",
    "Reshape",
    "UnsafeView",
    "Slice",
    "Index",
    "Select",
    "Transpose",
    "TBackward",
    "Permute",
    "Expand",
    "Accumulate",
)
"""Whoever gave a tensor another shape on purpose had this in mind."""


def taken_in_pairs(tensors: Any) -> str:
    """In words, where one of the losses is; empty where none is."""
    for loss in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
        if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
            for node in _nodes(loss.grad_fn):
                if found := _pair(node):
                    return found
    return ""


def _nodes(first: Any) -> Iterator[Any]:
    """Those of the graph, the nearest first."""
    seen, todo = {first}, deque([first])
    while todo and len(seen) < _FARTHEST:
        node = todo.popleft()
        yield node
        fresh = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(fresh)
        todo.extend(fresh)


def _pair(node: Any) -> str:
    if node.name().startswith(("SubBackward", "RsubBackward")):
        return _told(node, by_hand=True)
    if "LossBackward" in node.name() and _is_repeated(getattr(node, "_raw_saved_target", None)):
        return next(filter(None, (_told(one, by_hand=False) for one, _ in node.next_functions if _is_expanded(one))), "")
    return ""


def _is_repeated(saved: Any) -> bool:
    """Whether the target was made larger by saying the same numbers again, as broadcasting does. No hook of the user's is woken."""
    target = getattr(saved, "data", None)
    return isinstance(target, torch.Tensor) and 0 in target.stride()


def _is_expanded(node: Any) -> bool:
    return node is not None and node.name().startswith("ExpandBackward")


def _told(node: Any, *, by_hand: bool) -> str:
    """What a difference, or an output made as large as a target, was made of."""
    sources = [one for one, _ in node.next_functions if one is not None]
    sizes = _sizes(node)
    if len(sources) != 1 or len(sizes) != 2 or sizes[0] != sizes[1] or sizes[0] < 2:  # noqa: PLR2004 - N x N, and more than one sample
        return ""
    many = sizes[0]
    output = _sizes(sources[0])
    if output not in ({(many, 1)} if by_hand else {(many, 1), (many,)}) or (by_hand and sources[0].name().startswith(_MEANT)):
        return ""
    advice = "`target.unsqueeze(1)`, or `output.squeeze(1)`" if len(output) > 1 else "`target.squeeze(1)`, or `output.unsqueeze(1)`"
    pairs = f"the loss is of {shape(sizes)} pairs, each of the {many} outputs with each of the {many} targets"
    return f"{pairs}: the output is {shape(output)}, the target is not; write {advice}"


def _sizes(node: Any) -> tuple[int, ...]:
    """Of what the node's op gave."""
    found = node._input_metadata
    return tuple(found[0].shape) if len(found) == 1 and all(type(size) is int for size in found[0].shape) else ()
