"""Where two runs of the same code first differ, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import Cause, On
    from torchdebug_magics.report import Location

__all__ = ["ON", "Origin"]


ON: Final[Mapping[str, On]] = {
    "unseeded_generator": "seed",
    "python_random": "seed",
    "numpy_random": "seed",
    "worker_seed": "seed",
    "wall_clock": "clock",
    "os_entropy": "entropy",
    "hash_order": "order",
    "uninitialized_memory": "memory",
    "nondeterministic_op": "race",
    "state_leak": "carried_state",
}
"""By cause."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first line on the way to an op at which two runs differ."""

    cause: Cause
    location: Location
    other: Location | None = None
    """Where the other run stood, if it went another way."""
    decided: Location | None = None
    """The line that made the runs go different ways, where its cause is known."""
    branch: tuple[str, int, int] | None = None
    """The file, and the first and the last line, of the statement after which the runs went different ways."""
    branch_head: Location | None = None
    """The first line of that statement."""
    names: tuple[str, ...] = ()
    """What differs after the line, as the user writes it, such as ``"noise"`` or ``"self.scale"``."""
    sources: tuple[str, ...] = ()
    """What the line asked for numbers that are different each time, such as ``"time.perf_counter"``."""
    on: On | None = None
    """What the numbers depend on; of runs that went different ways, what decides the way does."""
    explanation: str
    """One sentence."""
    fix: str = ""
    """What to change; empty where nothing can be said."""
    further: tuple[Origin, ...] = ()
    """Other lines on the way to the same op, or other causes on this line, which remain when this one is repaired."""
