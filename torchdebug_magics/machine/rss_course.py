"""The memory of this process over time, in few enough points for a picture, however long it runs."""

from __future__ import annotations

__all__ = ["RssCourse"]

_MOST = 240


class RssCourse:
    """Keeps the largest of each stretch of samples; the stretches are of equal length, and double when there are too many."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._points: list[int] = []
        self._stride = 1
        self._pending: list[int] = []

    def add(self, size_bytes: int) -> None:
        """One more sample."""
        self._pending.append(size_bytes)
        if len(self._pending) < self._stride:
            return
        self._points.append(max(self._pending))
        self._pending = []
        if len(self._points) > self._most:
            self._points = [max(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]
            self._stride *= 2

    @property
    def points(self) -> tuple[int, ...]:
        """In order, with the samples of the stretch that has not ended."""
        return (*self._points, *([max(self._pending)] if self._pending else []))
