"""Counts what is written to ``sys.stdout`` and ``sys.stderr``, and remembers the end of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["OutputMeter"]

_TAIL = 4000


class OutputMeter:
    """Stands before the `write` of both streams between `attach` and the end of the stack."""

    def __init__(self) -> None:
        self.written = 0
        """Characters."""
        self.tail = ""
        """The last of them."""
        self._streams: list[tuple[Any, Any]] = []
        """Each with what stood in its own dict before, or None."""

    def attach(self, stack: ExitStack) -> None:
        """From now on; a stream that does not allow it is not counted."""
        stack.callback(self.detach)
        for stream in (sys.stdout, sys.stderr):
            held = getattr(stream, "__dict__", None)
            if isinstance(held, dict):
                self._streams.append((stream, held.get("write")))
                held["write"] = self._counting(stream.write)

    def detach(self) -> None:
        """Take them away again. Harmless the second time."""
        for stream, before in self._streams:
            if getattr(stream.__dict__.get("write"), "_torchdebug_owner", None) is self:
                del stream.__dict__["write"]
                if before is not None:
                    stream.__dict__["write"] = before
        self._streams.clear()

    def _counting(self, write: Callable[[str], Any]) -> Callable[[str], Any]:
        def counting(text: str) -> Any:
            __tracebackhide__ = True
            if isinstance(text, str):
                self.written += len(text)
                self.tail = (self.tail + text)[-_TAIL:]
            return write(text)

        counting._torchdebug_owner = self  # type: ignore[attr-defined]  # by which it is found again
        return counting
