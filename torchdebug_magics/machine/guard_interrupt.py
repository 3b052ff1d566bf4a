"""Interrupts the running cell, and records that the memory guard did so."""

from __future__ import annotations

import _thread
import signal
import threading
from dataclasses import dataclass

from torchdebug_magics.format import byte_size, share


@dataclass(frozen=True)
class Interrupt:
    """An interrupt by the memory guard."""

    used_bytes: int
    limit_bytes: int
    whose: str
    guard_ratio: float

    @property
    def reached(self) -> str:
        """How much of which limit was used."""
        return f"{byte_size(self.used_bytes)} of {byte_size(self.limit_bytes)} ({self.whose})"

    def action(self, where: str = "") -> str:
        """What the guard did, for a row of a report."""
        return f"interrupted the cell{where}, as `--guard {share(self.guard_ratio)}` asks; your variables are intact"

    def __str__(self) -> str:
        at = f"Interrupted at {self.reached}"
        return f"{at}, as the guard is set to {share(self.guard_ratio)}: the kernel is alive and your variables are intact"


def interrupt_main() -> bool:
    """Interrupt the main thread as the Stop button does; False where no cell runs and the signal is ignored."""
    if signal.getsignal(signal.SIGINT) in {signal.SIG_IGN, signal.SIG_DFL, None}:
        return False
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # also ends a sleep or a wait
    else:
        _thread.interrupt_main()
    return True
