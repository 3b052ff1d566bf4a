"""Torch's warnings of non-deterministic ops: collected with their lines, in place of being shown."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.deterministic.knowledge import repair
from torchdebug_magics.instruments.deterministic.report import Warned
from torchdebug_magics.instruments.deterministic.ritual.switches import mode
from torchdebug_magics.probing.where import locate, user_frame

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.report import Location

__all__ = ["Alerts"]

_MESSAGE = r"(?P<op>[^\n]{1,80}?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
_MOST = 1_000
"""Lines that are told apart."""


@dataclass
class _Met:
    op: str
    location: Location | None
    message: str
    count: int = 1


class Alerts:
    """What torch says of ops that it knows to be non-deterministic, each op of a line once.

    Where the user has let torch warn already, the warnings are still shown as they were; else they are only there because of us.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._shown = False
        self._met: dict[tuple[str, str, int], _Met] = {}
        self._is_open = False
        self._before: Callable[..., None] = warnings.showwarning
        self._hook: Callable[..., None] = self._show
        # A comment makes it this session's own, so that a nested one takes away only its own.
        self._pattern = f"{_MESSAGE}(?#{id(self)})"

    def attach(self, stack: ExitStack) -> None:
        """Listen until the stack closes; to be called before torch is told to warn."""
        stack.callback(self.remove)
        self._shown = mode() == "warn only"
        self._is_open = True
        self._before = warnings.showwarning
        warnings.showwarning = self._hook
        if not self._shown:
            warnings.filterwarnings("always", self._pattern, UserWarning)

    def remove(self) -> None:
        """Listen no more; filters that the user has set meanwhile stay."""
        self._is_open = False
        if warnings.showwarning is self._hook:
            warnings.showwarning = self._before
        filters: Any = warnings.filters
        for one in list(filters):
            if isinstance(one[1], re.Pattern) and one[1].pattern == self._pattern:
                filters.remove(one)

    @property
    def warned(self) -> tuple[Warned, ...]:
        """What was met, in the order in which it was."""
        return tuple(
            Warned(op=one.op, location=one.location, message=one.message, count=one.count, fix=repair(one.op)) for one in self._met.values()
        )

    def _show(self, message: Any, category: Any, *rest: Any, **named: Any) -> None:
        known = re.match(_MESSAGE, str(message)) if self._is_open else None
        if known is not None:
            self._guard.run("keeping a warning", self._keep, known["op"], str(message))
        if known is None or self._shown:
            self._before(message, category, *rest, **named)

    def _keep(self, op: str, message: str) -> None:
        frame = user_frame(sys._getframe())
        key = (op, "", 0) if frame is None else (op, frame.f_code.co_filename, frame.f_lineno)
        met = self._met.get(key)
        if met is not None:
            met.count += 1
        elif len(self._met) < _MOST:
            self._met[key] = _Met(op, None if frame is None else locate(frame), message)
