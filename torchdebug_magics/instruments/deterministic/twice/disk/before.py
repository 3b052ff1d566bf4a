"""What the first run found at each path that it has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = ["Before", "Was"]

_MOST_BYTES = 64 << 20
"""Of a file that is kept before it is written over."""


class Was(NamedTuple):
    """One path, as it was."""

    kind: Literal["absent", "folder", "file", "beginning", "lost"]
    """``"beginning"``: the file has only grown since; ``"lost"``: it was too large to be kept."""
    content: bytes = b""
    size_bytes: int = 0
    changed_ns: int = 0


class Before:
    """By whole path; each is noted once, before its first change."""

    def __init__(self) -> None:
        self._was: dict[str, Was] = {}
        self.listed: dict[str, list[str]] = {}
        """Folders whose names were asked for, in the order that was given."""

    def __contains__(self, path: str) -> bool:
        return path in self._was

    def __iter__(self) -> Iterator[str]:
        return iter(self._was)

    def as_now(self) -> Before:
        """Of the same paths, as they are now."""
        now = Before()
        for path in self._was:
            now.note(path)
        return now

    def of(self, path: str) -> Was | None:
        """None where the first run has changed nothing there."""
        return self._was.get(path)

    def note(self, path: str, *, grows: bool = False) -> None:
        """It is about to be changed; of what only `grows`, the size tells where it began."""
        known = self._was.get(path)
        if known is None:
            self._was[path] = _seen(path, grows=grows)
        elif known.kind == "beginning" and not grows:
            now = _seen(path, grows=False)
            self._was[path] = now._replace(content=now.content[: known.size_bytes], changed_ns=known.changed_ns)


def _seen(path: str, *, grows: bool) -> Was:
    try:
        found = os.lstat(path)
    except OSError:
        return Was("absent")
    if os.path.isdir(path):
        return Was("folder")
    if grows:
        return Was("beginning", size_bytes=found.st_size, changed_ns=found.st_mtime_ns)
    if not os.path.isfile(path) or found.st_size > _MOST_BYTES:
        return Was("lost")
    with open(path, "rb") as file:
        return Was("file", file.read(), changed_ns=found.st_mtime_ns)
