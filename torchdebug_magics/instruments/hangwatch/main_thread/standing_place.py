"""The line at which the main thread stands, and where it stood longest."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.hangwatch.causes.wording import with_article
from torchdebug_magics.probing.source.call_sites import line_of
from torchdebug_magics.probing.source.code_owner import frames_above
from torchdebug_magics.probing.waits.thread_waits import wait_of
from torchdebug_magics.probing.where import adopt_timed, locate, location

if TYPE_CHECKING:
    from types import FrameType

    from torchdebug_magics.instruments.hangwatch.main_thread.progress import Progress
    from torchdebug_magics.report import Location

__all__ = ["StandingPlace"]

_REST_S = 1.0
_ALMOST, _EVERY_S = 0.7, 0.25


class StandingPlace:
    """For the live view, and for a cell that ends before anybody was asked."""

    def __init__(self) -> None:
        self.at: Location | None = None
        """Of the latest rest."""
        self.longest_at: Location | None = None
        self.kind, self.what = "python", ""
        """Of the wait there."""
        self.hint = ""
        """What a cell that was stopped early was waiting for."""
        self._latest: tuple[str, int, str] | None = None

    @property
    def latest(self) -> Location | None:
        """The last line at which it was seen."""
        return self.at or (location(*self._latest) if self._latest else None)

    def look(self, frame: FrameType | None, progress: Progress, after_s: float) -> None:
        """At the innermost frame of the user's code."""
        if frame is None:
            return
        adopt_timed([frame])
        self._latest = frame.f_code.co_filename, line_of(frame), frame.f_code.co_name
        if progress.still_s > _REST_S:
            self.at = locate(frame)
        if progress.still_s > _ALMOST * max(after_s, progress.longest_s - _EVERY_S):
            waiting = wait_of([*frames_above(sys._current_frames().get(threading.main_thread().ident or 0))])
            self.kind, self.what = (waiting.kind, waiting.what) if waiting is not None else ("python", "")
            self.longest_at = locate(frame)
            waited = f"the main thread waited for {with_article(self.what)}" if self.kind != "python" else ""
            self.hint = f"the main thread slept in {self.what}" if self.kind == "sleep" else waited
