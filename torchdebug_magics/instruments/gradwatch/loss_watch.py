"""What happens between two steps: the losses that backward() is called on, clipping, and batches of a DataLoader."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from torchdebug_magics.probing.graphs import leaves_of
from torchdebug_magics.probing.lines import Line, Lines
from torchdebug_magics.probing.storages import local_of

_MOST_CLIPS = 8
_READ_EVERY = 64
"""Backward passes between two looks at the shape of the loss's graph, after the first few."""
_MOST_NODES = 48
_OF_TWO = "BinaryCrossEntropy"
_OF_MANY = ("NllLossBackward", "NllLoss2DBackward")


class ClipCall(NamedTuple):
    """One call of `clip_grad_norm_`."""

    parameters: frozenset[int]
    total: torch.Tensor
    max_norm: float
    line: Line | None


class LossWatch:
    """Collected until a step takes it; keeps copies of single numbers, and no graph."""

    def __init__(self, lines: Lines[Line]) -> None:
        self._lines = lines
        self.backward_count = 0
        self.total: torch.Tensor | None = None
        """The sum of the losses since the last step."""
        self.count = 0
        self.is_scaled = False
        """Whether the last one may be multiplied by a GradScaler."""
        self.line: Line | None = None
        self.classes: int | None = None
        self.clips: list[ClipCall] = []
        self.wants_leaves = False
        self.leaves: frozenset[int] | None = None
        """The ids of the tensors that the last loss depends on, where that was asked."""
        self._iterator: weakref.ref[Any] | None = None
        self._epochs: dict[int, int] = {}
        """Of each loader, by the id of what draws its indices."""
        self._epoch, self._fetched = 0, 0
        self._is_new = False
        """Whether a batch was fetched since the last step."""
        self._ahead: int | None = None

    def backward(self, loss: torch.Tensor) -> None:
        """A pass is about to begin from one number."""
        self.line = self._lines.here(sys._getframe())
        if self.backward_count < 4 or self.backward_count % _READ_EVERY == 0:  # noqa: PLR2004 - the first few
            self.classes = classes_of(loss) or (self.classes if self.backward_count else None)
        if self.wants_leaves:
            self.leaves = frozenset(map(id, leaves_of([loss])))
            self.wants_leaves = False
        self.is_scaled = loss.grad_fn is not None and loss.grad_fn.name() == "MulBackward0"
        self.backward_count += 1
        value = local_of(loss).detach()
        self.total = value.clone() if self.total is None or self.total.device != value.device else self.total + value
        self.count += 1
        if self._ahead is None:
            self._ahead = max(0, self._fetched - 1)

    def clipped(self, parameters: list[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
        """Gradients are about to be clipped."""
        call = ClipCall(frozenset(map(id, parameters)), total.detach(), max_norm, self._lines.here(sys._getframe()))
        self.clips = [*self.clips[-_MOST_CLIPS:], call]

    def fetched(self, iterator: object) -> None:
        """A DataLoader gave its next batch."""
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            key = id(getattr(iterator, "_index_sampler", None))
            self._epoch = self._epochs[key] = self._epochs.get(key, -1) + 1
            self._fetched, self._ahead = 0, None
        self._fetched += 1
        self._is_new = True

    @property
    def batch(self) -> tuple[int, int] | None:
        """(epoch, batch) that the last loss was computed from; what was fetched before the first loss of an epoch was fetched ahead."""
        return (self._epoch, max(0, self._fetched - 1 - (self._ahead or 0))) if self._is_new else None

    def taken(self) -> None:
        """A step has taken all of it."""
        self.total, self.count, self.clips, self.leaves = None, 0, [], None
        self._is_new = False


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
