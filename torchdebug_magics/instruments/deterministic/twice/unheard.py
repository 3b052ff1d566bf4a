"""Nothing of a later run is seen: what it prints, warns of and logs. The code that does so runs all the same, and may count it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from torchdebug_magics.probing.where import is_user_code

__all__ = ["Unheard"]

_HANDLE = logging.Handler.handle


class Unheard:
    """To be made before the first run: what is warned of later is what was warned of then."""

    def __init__(self) -> None:
        self._filters = list(warnings.filters)

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """A handler of the user's own is called; what Python's would show or send is not."""
        held: Any = logging.Handler
        before = vars(held)["handle"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.filters[:] = self._filters  # type: ignore[index]  # a list, whatever its stub says
            warnings.showwarning = _nothing
            held.handle = _handled
            try:
                yield
            finally:
                held.handle = before


def _nothing(*_: object, **__: object) -> None:
    return None


def _handled(handler: logging.Handler, record: logging.LogRecord) -> bool:
    __tracebackhide__ = True
    code = getattr(type(handler).emit, "__code__", None)
    if code is not None and is_user_code(code):
        return bool(_HANDLE(handler, record))
    return bool(handler.filter(record))
