"""What a deterministic cell leaves behind: whether it gave the same numbers twice, the op that did not, and what the ritual changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.deterministic.verdict import sentence, title
from torchdebug_magics.report import Location, Report

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
    from torchdebug_magics.instruments.deterministic.replicas.replica_record import ReplicaRecord

__all__ = [
    "Cause", "Cost", "Dependence", "DeterministicReport", "Divergence", "LiveRitual", "Loader", "On", "Potential", "SeededBy", "Setting",
    "Source", "StatusReport", "Warned",
]  # fmt: skip

SeededBy: TypeAlias = Literal["hand", "ritual", "entropy", "default", "unknown"]
"""``"ritual"``: by the ``%deterministic`` that is on.

``"default"``: the one seed with which torch begins a generator that nobody has seeded, the same in every process.
"""

Cause: TypeAlias = Literal[
    "unseeded_generator", "python_random", "numpy_random", "wall_clock", "os_entropy", "hash_order", "control_flow", "uninitialized_memory",
    "nondeterministic_op", "worker_seed", "state_leak", "outside_data", "unknown",
]  # fmt: skip


On: TypeAlias = Literal["seed", "carried_state", "settings", "order", "clock", "entropy", "race", "memory", "hardware"]


class Setting(NamedTuple):
    """One switch of torch's, or of the environment."""

    before: object
    during: object


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first op at which two runs differ: in what it gave, in data that came to it from outside of torch, or in which op it is."""

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
    on: On | None = None
    """What the numbers depend on by it, where that is known; of a ``"control_flow"``, what decides the way does."""
    further: tuple[Dependence, ...] = ()
    """What the op depends on besides, and still does when this cause is repaired."""
    other: Location | None = None
    """A second line that belongs to it: where the data comes from, what decides which way is taken, where the memory is read, or, where
    nothing is known of that, where the other run went."""
    phase: str = "forward"
    """``"forward"`` or ``"backward"``."""


@dataclass(frozen=True, kw_only=True)
class Dependence:
    """What another run has otherwise than this one had, and by which its numbers change."""

    on: On
    op: str
    """The first op whose numbers change, and go on to the results; empty where no op of torch's is concerned."""
    module: str | None = None
    location: Location | None
    """Where that op is, or the line of Python before it at which the numbers first differ; of what is carried, the line that changes it."""
    other: Location | None = None
    """Of what is carried: where the next run first differs."""
    what: str
    """A clause: subject, verb, object."""
    fix: str
    """What to change; empty where nothing can be said."""


@dataclass(frozen=True, kw_only=True)
class Potential:
    """What gave the same numbers in these two runs, and need not in others."""

    op: str
    """Or what else it is: the name of a generator, ``"set"``, ``"hash"``."""
    module: str | None
    location: Location | None
    differed_count: int
    """Of so many repetitions on the very same inputs."""
    repetitions_count: int
    """0 where two runs of one process cannot differ, and those of two can."""
    explanation: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """An op that torch itself calls non-deterministic, met while the cell ran."""

    op: str
    """As torch's warning calls it."""
    location: Location | None
    message: str
    count: int = 1
    """How often at this line."""
    fix: str = ""
    """What has a deterministic way in its place; empty where nothing is known."""


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
    keep_rng: bool = False
    """Whether the generators were to go on from where the cell left them."""
    restored: bool = True
    """Whether everything is as it was before; with `keep_rng`, all but the generators."""
    overruled: tuple[str, ...] = ()
    """What the cell itself set otherwise, and was put back all the same; a sentence each."""
    generators: tuple[str, ...] = ()
    """The user's own, by name, that were seeded."""
    threads_count: int = 0
    """Torch's, at the start: sums may differ by it."""
    too_late: tuple[str, ...] = ()
    """What can no longer be set in this process, a sentence each."""
    warnings: tuple[Warned, ...] = ()
    verified: bool | None = None
    """Whether two runs were bit-identical; None where they were not compared."""
    not_verified: str = ""
    """Why not, where it was asked for."""
    against: str = ""
    """What it was compared with, if not with a second run of itself."""
    rtol: float | None = None
    """How far numbers were allowed to be apart; None where every bit was compared."""
    divergence: Divergence | None = None
    ops_count: int | None = None
    """How many ops were compared or recorded; None where none was looked at."""
    depends_on: tuple[Dependence, ...] = ()
    """What the numbers depend on besides the code and its data, worst first."""
    carried: tuple[str, ...] = ()
    """Names of what the next run of the cell finds changed, as far as its numbers depend on it."""
    interrupted: bool = False
    """Whether an interrupt ended the further runs; what was found before it is told."""
    unchecked: tuple[str, ...] = ()
    """What an interrupt, or a failure of ours, has left untried, a phrase each, such as ``"other seeds"``."""
    runs_count: int = 0
    """Further runs of the cell that were made to find out."""
    runs_s: float = 0.0
    """How long they took."""
    potential: tuple[Potential, ...] = ()
    unrestorable: tuple[str, ...] = ()
    """What the second run did not find as the first one did, such as a consumed iterator; a name or a phrase each."""
    slowdown_ratio: float | None = None
    """The time under the ritual to the time without; None where it was not measured."""
    costs: tuple[Cost, ...] = ()
    fingerprint: Fingerprint | None = None
    """What each op gave, for a later comparison; None where it was not recorded."""
    replica: ReplicaRecord | None = None
    """Of a process of a job that trains: digests that are compared with the other ranks'."""

    @property
    def verdict(self) -> str:
        """What differed, where, why, and the fix; or what holds."""
        return sentence(self)

    @property
    def title(self) -> str:
        """What differed and where; or what holds."""
        return title(self)


@dataclass(frozen=True)
class LiveRitual:
    """While a session is open."""

    seed: int
    settings_count: int
    generators: tuple[str, ...]
    """The user's own, by name, that were seeded."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of random numbers, as it stands."""

    name: str
    kind: str
    is_global: bool = False
    """Whether it is the one that a library draws from by itself."""
    seed: int | None
    """None where nothing tells."""
    seeded: SeededBy
    state: str
    """A few letters: the same as long as nothing is drawn from it."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A DataLoader, and where its workers' seeds come from."""

    name: str
    workers_count: int
    generator: str
    """The name or kind of its own; empty where it draws from torch's global one."""
    workers_alive: bool
    """Whether workers of an earlier loop go on, with the seeds of that time."""


@dataclass(frozen=True, kw_only=True)
class StatusReport(Report):
    """Every source of randomness, and all that decides whether the same code gives the same numbers."""

    sources: tuple[Source, ...]
    settings: Mapping[str, object]
    """By name, each switch of the ritual's as it stands."""
    loaders: tuple[Loader, ...]
    threads_count: int
    hash_seed: str
    """PYTHONHASHSEED as the interpreter began; ``"random"`` where the order of strings in sets differs with every start."""

    @property
    def verdict(self) -> str:
        """How many generators differ in every run, and which."""
        entropy = [f"`{one.name}`" for one in self.sources if one.seeded == "entropy"]
        return f"{self.title}: {listed(entropy)}" if entropy else self.title

    @property
    def title(self) -> str:
        """How many generators differ in every run."""
        many = plural(len(self.sources), "random number generator")
        entropy = sum(one.seeded == "entropy" for one in self.sources)
        if not entropy:
            return f"{many}, none known to be seeded from entropy"
        return f"{entropy} of {many} {'is' if entropy == 1 else 'are'} seeded from entropy, different in every run"
