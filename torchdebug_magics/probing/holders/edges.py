"""Who holds whom, by number."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["edges", "reach"]


def edges(sources: Iterable[int], targets: Iterable[int], among: Collection[int] | None = None) -> dict[int, list[int]]:
    """The targets of each source, where both are among some."""
    found: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        if among is None or (source in among and target in among):
            found.setdefault(source, []).append(target)
    return found


def reach(starts: Iterable[int], edges: dict[int, list[int]]) -> set[int]:
    """The starts, and all that they lead to."""
    found = set(starts)
    todo = list(found)
    while todo:
        for target in edges.get(todo.pop(), ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return found
