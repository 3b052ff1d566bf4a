"""The live view: a thread that draws the session at most four times a second and sends changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdebug_magics.machine.sampler import Sampler

if TYPE_CHECKING:
    from torchdebug_magics.jupyter.display import Channel, Screen

__all__ = ["LiveView"]

_FIRST_S = 0.3
"""Delay before the first view, so that a quick cell shows only its report."""
_EVERY_S = 0.25


class LiveView:
    """Draws and sends a view from `start` to `stop`."""

    def __init__(self, draw: Callable[[], tuple[str, str] | None], screen: Screen, *, lasting: bool = False) -> None:
        self._draw = draw
        """Returns the current view as text and HTML, or None."""
        self._screen = screen
        self._lasting = lasting
        self._channel: Channel | None = None
        self._sent = ("", "")
        # Its context ties what the thread sends to the cell that started it.
        self._sampler = Sampler(self._look, name="live", every_s=_EVERY_S, first_s=_FIRST_S)
        self._failure: Exception | None = None

    def start(self) -> None:
        """Start the thread, if the screen supports live views."""
        try:
            self._channel = self._screen.live_channel(lasting=self._lasting)
            if self._channel is None:
                return
            drawn = self._draw()  # whatever this imports is then imported by this thread, never beside an import of the user's
            if self._lasting and drawn is not None:  # at once, as from the thread it may come when another cell runs, and be shown there
                self._send(*drawn)
        except Exception as failure:  # noqa: BLE001 - the view is a courtesy: the session goes on
            self._failure = failure
            return
        self._sampler.start()

    def stop(self) -> None:
        """Join the thread and remove the view; idempotent."""
        self._sampler.stop()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
        failure = self._failure or self._sampler.failure
        self._failure = self._sampler.failure = None
        if failure is not None:
            self._screen.say(f"(the live view failed: {type(failure).__name__}: {failure})")

    def _look(self) -> None:
        drawn = self._draw()
        if drawn is not None and drawn != self._sent and not self._sampler.is_stopping:
            self._send(*drawn)

    def _send(self, text: str, html: str) -> None:
        if self._channel is not None:
            self._channel.send(text, html)
            self._sent = (text, html)
