"""Interrupts the running cell before the system kills the kernel."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.format import byte_size
from torchdebug_magics.machine.guard_interrupt import Interrupt, interrupt_main
from torchdebug_magics.machine.limits import Limit, Limits
from torchdebug_magics.machine.sampler import Sampler

GUARD_EVERY_S = 0.05


class MemoryGuard:
    """Looks at every limit; each crossing interrupts once.

    What was allocated stays, so that usage is still above the guard afterwards: then it is raised to half of what is left, and one
    can clean up in the next cell.
    """

    def __init__(self, ratio: float, limits: Limits) -> None:
        self.ratio = ratio
        self.interrupts: tuple[Interrupt, ...] = ()
        self._limits = limits
        self._raised: dict[str, float] = {}
        self._interrupted_at: tuple[int, int] | None = None

    @property
    def reason(self) -> str:
        """Why it has interrupted last; empty where it has not."""
        return str(self.interrupts[-1]) if self.interrupts else ""

    def refuse_if_passed(self) -> None:
        """A guard that would step in at once is a mistake."""
        for limit in self._passed():
            used = f"{byte_size(_used(limit))} of {byte_size(limit.limit_bytes)} ({limit.whose}) are used already"
            msg = f"the guard is set to {self.ratio:.0%}, but {used}: free memory (see `%memclean`), or raise the guard"
            raise TorchDebugError(msg)

    def watching(self) -> Sampler:
        """A thread that looks, for who has none of their own."""
        return Sampler(self.look, name="guard", every_s=GUARD_EVERY_S)

    def look(self) -> None:
        """Called by a thread, again and again."""
        if self._interrupted_at is not None:
            self._once_more()
        for limit in self._passed():
            if interrupt_main():
                used_bytes = _used(limit)
                self.interrupts += (Interrupt(used_bytes, limit.limit_bytes, limit.whose, self.ratio),)
                self._raised[limit.whose] = (1 + used_bytes / limit.limit_bytes) / 2
                self._interrupted_at = _place()
                return

    def _once_more(self) -> None:
        """A signal that falls just before a sleep begins does not wake it: Python sees it at the sleep's end. A second one does."""
        if self._interrupted_at == _place() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            interrupt_main()
        self._interrupted_at = None

    def _passed(self) -> Iterable[Limit]:
        for limit in self._limits.all():
            used_ratio = _used(limit) / limit.limit_bytes
            if used_ratio < self.ratio:
                self._raised.pop(limit.whose, None)
            elif used_ratio >= self._raised.get(limit.whose, self.ratio):
                yield limit


def guard_ratio(text: str | float) -> float:
    """``"90%"`` or ``0.9``."""
    try:
        ratio = float(text.removesuffix("%")) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < 1:
        msg = f"--guard takes a share of the memory limit, such as 90%, not {text!r}"
        raise TorchDebugError(msg)
    return ratio


def _used(limit: Limit) -> int:
    return limit.limit_bytes - limit.left_bytes


def _place() -> tuple[int, int] | None:
    """Where the main thread is, as a number: to hold its frame would hold its variables."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented, whatever its name says
    return None if frame is None else (id(frame), frame.f_lasti)
