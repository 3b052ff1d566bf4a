"""How much of the time processes wait for memory, and how near the limit is at which they are killed."""

from __future__ import annotations

from dataclasses import dataclass

from torchdebug_magics.machine.files import read
from torchdebug_magics.machine.limits import binding_limit

__all__ = ["MemoryPressure", "memory_pressure"]


@dataclass(frozen=True)
class MemoryPressure:
    """One look."""

    stalled_ratio: float
    """Of the last ten seconds, in which some process waited for memory; 0 where the system does not tell."""
    swapped_bytes: int
    """Of this process."""
    used_ratio: float
    """Of the limit that comes first."""
    whose: str


def memory_pressure() -> MemoryPressure:
    """From the system's pressure stall information, where it has any."""
    stalled = 0.0
    for file in ("/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory"):
        text = read(file) or ""
        if text.startswith("some"):
            stalled = max(stalled, float(text.partition("avg10=")[2].split()[0]) / 100)
    status = (read("/proc/self/status") or "").splitlines()
    swapped = next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmSwap:")), 0)
    limit = binding_limit()
    used = 0.0 if limit is None else 1 - limit.left_bytes / max(limit.limit_bytes, 1)
    return MemoryPressure(stalled, swapped, used, "" if limit is None else limit.whose)
