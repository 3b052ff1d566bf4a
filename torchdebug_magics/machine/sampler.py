"""A thread that looks at something again and again."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_JOIN_S = 2.0
"""A look that is stuck in a driver must not hang the cell."""


class Sampler:
    """Calls `look` between `start` and `stop`, in the context in which it was started; a failure ends it, and is kept."""

    def __init__(self, look: Callable[[], None], *, name: str, every_s: float, first_s: float | None = None) -> None:
        self._look = look
        self._name = f"torchdebug-{name}"
        self._every_s = every_s
        self._first_s = every_s if first_s is None else first_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether a look that has begun should rather not end in an effect."""
        return self._stop.is_set()

    def start(self) -> None:
        """Begin; a thread of ours never prints, as that would go to whichever cell runs."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Join the thread. Harmless the second time."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None:  # an interrupt may have come before it began
            thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._stop.wait(wait_s):
            wait_s = self._every_s
            try:
                self._look()
            except Exception as failure:  # noqa: BLE001 - said by who reads `failure`; the user's cell goes on
                self.failure = failure
                return
