"""Where two runs of the same code first differ, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.report import Cause
    from torchdebug_magics.report import Location

__all__ = ["Origin"]


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
    because: Cause | None = None
    """Why what decides the way differs, where the runs went different ways and that is known."""
    explanation: str
    """One sentence."""
    fix: str = ""
    """What to change; empty where nothing can be said."""
