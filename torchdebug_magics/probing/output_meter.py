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
        self._counts: list[tuple[Any, _Counting]] = []

    def attach(self, stack: ExitStack) -> None:
        """From now on; a stream that does not allow it is not counted."""
        stack.callback(self.detach)
        for stream in (sys.stdout,) if sys.stdout is sys.stderr else (sys.stdout, sys.stderr):
            held = getattr(stream, "__dict__", None)
            if isinstance(held, dict):
                counting = _Counting(self, stream.write, held.get("write"))
                self._counts.append((stream, counting))
                held["write"] = counting

    def detach(self) -> None:
        """Take them away again, also from below those that came later. Harmless the second time."""
        for stream, counting in self._counts:
            counting.is_open = False
            top = stream.__dict__.get("write")
            while isinstance(top, _Counting) and not top.is_open:
                top = top.before
                stream.__dict__.pop("write", None)
                if top is not None:
                    stream.__dict__["write"] = top
        self._counts.clear()


class _Counting:
    """A `write` that counts; once closed, it only hands on."""

    def __init__(self, meter: OutputMeter, write: Callable[..., Any], before: Any) -> None:
        self._meter = meter
        self._write = write
        self.before = before
        """What stood in the stream's own dict, or None."""
        self.is_open = True

    def __call__(self, *texts: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        if self.is_open and texts and isinstance(texts[0], str):
            meter = self._meter
            meter.written += len(texts[0])
            meter.tail = (meter.tail + texts[0][-_TAIL:])[-_TAIL:]
        return self._write(*texts, **named)
