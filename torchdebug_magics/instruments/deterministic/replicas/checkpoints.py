"""The steps at which replicas are looked at: the same on every rank, and few, as each look reads all weights."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Checkpoints"]

_MOST = 256
_LEAST = 16
_MOST_DIGESTS = 1 << 17

T = TypeVar("T")


class Checkpoints(Generic[T]):
    """Values recorded at checkpoints: the first eight steps, then each time the step count has grown by a quarter; or every step."""

    def __init__(self, tensors_count: int, *, every: bool) -> None:
        self.held: dict[int, T] = {}
        self._most = max(_LEAST, min(_MOST, _MOST_DIGESTS // max(1, tensors_count)))
        self._every = every
        self._spacing = 1
        self._next = 0

    def is_due(self, step: int) -> bool:
        """Whether this step is to be noted."""
        return step >= self._next

    def note(self, step: int, value: T) -> None:
        """Record the value of a due step; when there is no more room, drop every second value of the later half."""
        self.held[step] = value
        if len(self.held) >= self._most:
            steps, half = list(self.held), len(self.held) // 2
            self.held = {one: self.held[one] for one in (*steps[:half], *steps[half::2])}
            self._spacing *= 2
        self._next = step + self._spacing * (1 if self._every else max(1, step // 4))
