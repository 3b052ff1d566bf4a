"""Records the kernel's current line and memory in a file, so that the next kernel can report how this one ended."""

from __future__ import annotations

import atexit
import hashlib
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdebug_magics.machine.blackbox import BlackBox, Entry, last_words
from torchdebug_magics.machine.limits import Limits
from torchdebug_magics.machine.process import rss_bytes
from torchdebug_magics.machine.sampler import Sampler
from torchdebug_magics.session import Session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_EVERY_S = 0.25
_KILLS_EVERY_S = 1.0
_GROWTH_OVER_S = 2.0


class Recorder:
    """The kernel's black box, open while a session needs it. A restarted kernel has the same connection file."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._path = _path(shell)
        self._limits = Limits(counts_kills=False)
        self._kills: dict[str, int | None] = {}
        """Usage of the nearest limit, at most a second old."""
        self._kills_at_s = -_KILLS_EVERY_S
        self._main = threading.main_thread().ident
        self._open = ExitStack()
        self._wanted: dict[Session[Any], None] = {}
        self._latest: deque[tuple[float, int]] = deque()
        """(time, used bytes) of the last two seconds."""

    def last_words(self) -> str:
        """How the previous kernel died, in one sentence; empty if it did not."""
        return "" if self._path is None else last_words(self._path)

    def start(self, session: Session[Any]) -> None:
        """Record `session`; does nothing outside a kernel."""
        is_open = bool(self._wanted)
        self._wanted[session] = None
        if is_open or self._path is None:
            return
        try:
            box = self._open.enter_context(BlackBox(self._path))
        except OSError:  # a full disk, or none to write on: then nobody will be told
            return
        self._latest.clear()
        self._open.callback(atexit.unregister, self._open.close)
        atexit.register(self._open.close)
        self._open.enter_context(Sampler(lambda: self._write(box), name="recorder", every_s=_EVERY_S))

    def stop(self, session: Session[Any]) -> None:
        """Stop recording `session`; idempotent."""
        self._wanted.pop(session, None)
        if not self._wanted:
            self._open.close()

    def _write(self, box: BlackBox) -> None:
        limit = self._limits.binding()
        if limit is None:
            return
        used_bytes = limit.limit_bytes - limit.left_bytes
        growth = self._growth(used_bytes)
        size, kills = limit.limit_bytes, self._kills_of(limit.whose)
        standing = next(filter(None, (session.standing() for session in tuple(self._wanted))), "")
        box.write(Entry(self._place(), rss_bytes(), used_bytes, size, limit.whose, growth, kills, standing))

    def _kills_of(self, whose: str) -> int | None:
        now_s = time.monotonic()
        if now_s - self._kills_at_s > _KILLS_EVERY_S:
            self._kills, self._kills_at_s = {limit.whose: limit.oom_kills_count for limit in Limits().all()}, now_s
        return self._kills.get(whose)

    def _growth(self, used_bytes: int) -> int:
        now_s = time.monotonic()
        self._latest.append((now_s, used_bytes))
        while now_s - self._latest[0][0] > _GROWTH_OVER_S:
            self._latest.popleft()
        since_s, before_bytes = self._latest[0]
        return round((used_bytes - before_bytes) / (now_s - since_s)) if now_s > since_s else 0

    def _place(self) -> str:
        """The innermost cell line of the main thread."""
        names: dict[str, int] = vars(self._shell.compile).get("_filename_map", {})
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - the only door to another thread's frames
        while frame is not None:
            if (number := names.get(frame.f_code.co_filename)) is not None:
                return f"In[{number}] line {frame.f_lineno}"
            frame = frame.f_back
        return ""


def _path(shell: InteractiveShell) -> Path | None:
    """Path next to the connection file, under a name that no search for connection files matches."""
    kernel: Any = getattr(shell, "kernel", None)
    connection = getattr(getattr(kernel, "parent", None), "abs_connection_file", "")
    if not connection:
        return None
    file = Path(connection)
    return file.parent / f"torchdebug-{hashlib.sha256(file.name.encode()).hexdigest()[:16]}.blackbox"
