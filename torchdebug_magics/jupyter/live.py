"""The live view: a thread that looks at the session, at most four times a second, and sends what has changed."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.jupyter.display import Channel, Screen

__all__ = ["LiveView"]

_FIRST_S = 0.3
"""A quick cell shows its report alone: nothing flickers."""
_EVERY_S = 0.25
_JOIN_S = 2.0
"""A sampler that is stuck in a driver must not hang the cell."""


class LiveView:
    """Draws, and sends to a channel of the screen, between `start` and `stop`. The thread never prints."""

    def __init__(self, draw: Callable[[], tuple[str, str] | None], screen: Screen) -> None:
        self._draw = draw
        """Text and HTML of now, or None where there is nothing to see."""
        self._screen = screen
        self._channel: Channel | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self) -> None:
        """Begin, where the screen can show it."""
        try:
            self._channel = self._screen.live_channel()
            if self._channel is None:
                return
            self._draw()  # whatever this imports is then imported by this thread, never beside an import of the user's
        except Exception as failure:  # noqa: BLE001 - the view is a courtesy: the session goes on
            self._failure = failure
            return
        # The context ties what the thread sends to the cell that started it.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._sample,), name="torchdebug-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Join the thread and take the view away. Harmless the second time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._screen.say(f"(the live view failed: {type(failure).__name__}: {failure})")

    def _sample(self) -> None:
        channel, sent = self._channel, ("", "")
        wait_s = _FIRST_S
        while channel is not None and not self._stop.wait(wait_s):
            wait_s = _EVERY_S
            try:
                drawn = self._draw()
                if drawn is not None and drawn != sent and not self._stop.is_set():
                    channel.send(*drawn)
                    sent = drawn
            except Exception as failure:  # noqa: BLE001 - as in start(); said by stop(), as a thread never prints
                self._failure = failure
                return
