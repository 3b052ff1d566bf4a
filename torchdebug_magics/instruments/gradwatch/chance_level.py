"""How many classes a loss chooses from, read from the shapes in its graph; no saved tensor is touched."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["classes_of"]

_MOST_NODES = 48
_OF_TWO = "BinaryCrossEntropy"
_OF_MANY = ("NllLossBackward", "NllLoss2DBackward")


def classes_of(loss: torch.Tensor) -> int | None:
    """C of a cross-entropy over C classes; 2 of a binary one; None for any other loss, and for several that differ."""
    found: set[int] = set()
    todo: deque[Any] = deque([loss.grad_fn] if loss.grad_fn is not None else [])
    for _ in range(_MOST_NODES):
        if not todo:
            break
        node = todo.popleft()
        name = node.name()
        if name.startswith(_OF_TWO):
            found.add(2)
        elif name.startswith(_OF_MANY):
            scores = node.next_functions[0][0]
            shape = tuple(scores._input_metadata[0].shape) if getattr(scores, "_input_metadata", None) else ()
            found.add(int(shape[1 if len(shape) > 1 else 0]) if shape else 0)
        else:
            todo.extend(before for before, _ in node.next_functions if before is not None)
    return (found.pop() or None) if len(found) == 1 else None
