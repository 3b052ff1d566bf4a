"""Keeps a second run silent: what it prints is kept for a comparison, what it warns of and logs is neither shown nor sent."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

from torchdebug_magics.probing.source.user_code import is_user_code, user_frame

_HANDLE = logging.Handler.handle
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
_MOST_LINES, _MOST_LETTERS = 2_000, 10_000
Place: TypeAlias = "tuple[str, int, str]"
"""(file, line, function)"""


class Heard(io.TextIOBase):
    """What a run prints."""

    def __init__(self) -> None:
        self.lines: list[tuple[Place | None, str]] = []
        """The line of the user's code, and what it printed without another line in between; only the first so many."""

    def writable(self) -> bool:
        """As any stream for output."""
        return True

    def write(self, text: str) -> int:
        """Keep it."""
        frame = user_frame(sys._getframe(1))
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if self.lines and self.lines[-1][0] == place and len(self.lines[-1][1]) < _MOST_LETTERS:
            self.lines[-1] = place, self.lines[-1][1] + text
        elif len(self.lines) < _MOST_LINES:
            self.lines.append((place, text))
        return len(text)

    def other_numbers(self, before: Heard) -> Iterator[int]:
        """Where this one prints another number than the one before, at the same lines and in the same words."""
        if [place for place, _ in self.lines] == [place for place, _ in before.lines]:
            for number, ((_, text), (_, was)) in enumerate(zip(self.lines, before.lines, strict=True)):
                if text != was and "0x" not in text and _NUMBER.sub("", text) == _NUMBER.sub("", was):
                    yield number


class Unheard:
    """To be made before the first run: what is warned of later is what was warned of then."""

    def __init__(self) -> None:
        self._filters = list(warnings.filters)

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[Heard]:
        """A handler of the user's own is called; what Python's would show or send is not."""
        held: Any = logging.Handler
        before = vars(held)["handle"]
        heard = Heard()
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filters[:] = self._filters  # type: ignore[index]  # a list, whatever its stub says
            warnings.showwarning = _says_nothing
            held.handle = _handled
            try:
                yield heard
            finally:
                held.handle = before


def _says_nothing(*_: object, **__: object) -> None:
    return None


def _handled(handler: logging.Handler, record: logging.LogRecord) -> bool:
    __tracebackhide__ = True
    code = getattr(type(handler).emit, "__code__", None)
    if code is not None and is_user_code(code):
        return bool(_HANDLE(handler, record))
    return bool(handler.filter(record))
