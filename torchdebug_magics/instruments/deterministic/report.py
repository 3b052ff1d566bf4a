"""What a deterministic cell leaves behind: whether it gave the same numbers twice, the op that did not, and what the ritual changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torchdebug_magics.report import Location, Report

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint

__all__ = ["Cause", "Cost", "DeterministicReport", "Divergence", "Potential", "Setting", "Warned"]

Cause: TypeAlias = Literal[
    "unseeded_generator", "python_random", "numpy_random", "wall_clock", "os_entropy", "hash_order", "control_flow", "uninitialized_memory",
    "nondeterministic_op", "worker_seed", "state_leak", "outside_data", "unknown",
]  # fmt: skip


class Setting(NamedTuple):
    """One switch of torch's, or of the environment."""

    before: object
    during: object


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first op whose inputs agree in both runs, and whose outputs differ."""

    op: str
    """The dispatcher's name, such as ``aten.randn.generator``; empty where no op of torch's is concerned."""
    module: str | None
    """Module path of the innermost running module; None outside one."""
    location: Location | None
    occurrence: int
    """Which call of this op at this line, 1-based."""
    cause: Cause
    explanation: str
    """One sentence on what differed, and why."""
    fix: str
    """What to change; empty where nothing can be said."""
    other: Location | None = None
    """Where the other run stood, if it went another way."""
    phase: str = "forward"
    """``"forward"`` or ``"backward"``."""


@dataclass(frozen=True, kw_only=True)
class Potential:
    """What gave the same numbers in these two runs, and need not in others."""

    op: str
    module: str | None
    location: Location | None
    differed_count: int
    """Of so many repetitions on the very same inputs."""
    repetitions_count: int
    explanation: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """An op that torch itself calls non-deterministic, met while the cell ran."""

    op: str
    location: Location | None
    message: str
    fix: str = ""


@dataclass(frozen=True)
class Cost:
    """What one setting costs."""

    setting: str
    ratio: float
    """The cell's time with this setting alone, to its time with none."""


@dataclass(frozen=True, kw_only=True)
class DeterministicReport(Report):
    """Of one cell, or of the time between ``%deterministic`` and ``%deterministic off``."""

    seed: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """By name, what stood before and what while the cell ran; of those that were changed."""
    restored: bool = True
    """Whether everything is as it was before."""
    too_late: tuple[str, ...] = ()
    """What can no longer be set in this process, a sentence each."""
    warnings: tuple[Warned, ...] = ()
    verified: bool | None = None
    """Whether two runs were bit-identical; None where they were not compared."""
    not_verified: str = ""
    """Why not, where it was asked for."""
    against: str = ""
    """What it was compared with, if not with a second run of itself."""
    divergence: Divergence | None = None
    ops_count: int | None = None
    """How many ops were compared or recorded; None where none was looked at."""
    potential: tuple[Potential, ...] = ()
    unrestorable: tuple[str, ...] = ()
    """What the second run did not find as the first one did, such as a consumed iterator; a name or a phrase each."""
    slowdown_ratio: float | None = None
    """The time under the ritual to the time without; None where it was not measured."""
    costs: tuple[Cost, ...] = ()
    fingerprint: Fingerprint | None = None
    """What each op gave, for a later comparison; None where it was not recorded."""

    @property
    def verdict(self) -> str:
        """What differed, where, and the repair; or what holds."""
        found = self.divergence
        if found is None:
            return f"Seeded with {self.seed}"
        return " · ".join(filter(None, (found.op, str(found.location or ""), found.explanation, found.fix)))
