"""What a thread waits for, as the thread's own process knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["Kind", "Target", "Waiting"]

Kind: TypeAlias = Literal[
    "lock", "queue", "event", "join", "batch", "collective", "input", "sleep", "io", "native", "gil", "python", "dead"
]  # fmt: skip
Target: TypeAlias = tuple[Literal["thread", "process", "task"], int]
"""A thread of the same process by its ident, a process by its number, an asyncio task by its id."""


@dataclass
class Waiting:
    """One wait."""

    kind: Kind
    what: str
    """A phrase: ``"batch 2"``, ``"lock"``."""
    on: Any = None
    """The object, such as a lock: compared by identity in its own process."""
    targets: list[Target] = field(default_factory=list)
    """Who would end the wait, where that is known."""
    able: list[Target] = field(default_factory=list)
    """Who else could end it: code that can get at what is waited for."""
    timeout_s: float | None = None
    """After which the wait gives up, counted from its beginning; None for one without a timeout."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a cause is told by: ``debugger``, ``network``, ``idle``, ``acquired`` (file, line, function), ``semaphore`` (a name), ..."""
