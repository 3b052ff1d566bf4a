"""That the memory guard stepped in, as it is said in a report."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.format import byte_size, share

__all__ = ["Interrupt"]


@dataclass(frozen=True)
class Interrupt:
    """The guard stepped in."""

    used_bytes: int
    limit_bytes: int
    whose: str
    guard_ratio: float

    def __str__(self) -> str:
        used = f"{byte_size(self.used_bytes)} of {byte_size(self.limit_bytes)} ({self.whose})"
        return f"Interrupted at {used}, as the guard is set to {share(self.guard_ratio)}: the kernel lives, and the variables are there"
