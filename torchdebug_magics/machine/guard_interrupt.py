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

    def __str__(self) -> str:
        used = f"{byte_size(self.used_bytes)} of {byte_size(self.limit_bytes)} ({self.whose})"
        return f"Interrupted at {used}, as the guard is set to {share(self.guard_ratio)}: the kernel is alive and your variables are intact"


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
