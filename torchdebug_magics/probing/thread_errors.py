"""Exceptions that end threads: Python prints them, and whoever waits for the thread is not told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from torchdebug_magics.probing.waits.error_facts import error_record
from torchdebug_magics.probing.wrappers import unwrap_all, wrap

__all__ = ["ThreadErrors"]

_MOST = 100


class ThreadErrors:
    """Open between `attach` and the end of the stack. A hook of the user's is called as before."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        """By the name of the thread: ``type``, ``message``, ``at_s``, ``frames``; no exception is held."""

    def attach(self, stack: ExitStack) -> None:
        """Note each from now on."""
        wrap(stack, self, threading, "excepthook", self._ended)

    def sweep(self) -> None:
        """Remove what an interrupt may have left."""
        unwrap_all(self)

    def _ended(self, original: Callable[[Any], Any], arguments: Any) -> Any:
        __tracebackhide__ = True
        with suppress(Exception):  # a message that cannot be made: what is printed of it comes all the same
            if arguments.thread is not None and isinstance(arguments.exc_value, Exception) and len(self.records) < _MOST:
                self.records[arguments.thread.name] = error_record(arguments.exc_value)
        return original(arguments)
