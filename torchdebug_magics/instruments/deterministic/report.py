"""The report of a deterministic cell: whether two runs agree, the first op that differs, and the settings that were changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from torchdebug_magics.format import listed, plural
from torchdebug_magics.instruments.deterministic.fingerprint import Fingerprint
from torchdebug_magics.ranks.compared import Compared, Details, Moment, Samples
from torchdebug_magics.ranks.report import RankFindingKind
from torchdebug_magics.report import Finding, Location, Report

SeededBy: TypeAlias = Literal["hand", "ritual", "entropy", "default", "unknown"]
"""``"ritual"``: seeded by the ``%deterministic`` that is on.

``"default"``: never seeded, so it has PyTorch's default seed, which is the same in every process.
"""
Cause: TypeAlias = Literal[
    "unseeded_generator", "python_random", "numpy_random", "wall_clock", "os_entropy", "hash_order", "control_flow", "uninitialized_memory",
    "nondeterministic_op", "worker_seed", "state_leak", "outside_data", "unknown",
]  # fmt: skip
On: TypeAlias = Literal["seed", "carried_state", "settings", "order", "clock", "entropy", "race", "memory", "hardware"]


class Setting(NamedTuple):
    """One setting of PyTorch or of the environment."""

    before: object
    during: object


@dataclass(frozen=True, kw_only=True)
class Divergence(Finding):
    """The first op at which two runs differ: in its result, in an input from outside PyTorch, or in which op it is."""

    op: str
    """The dispatcher's name, such as ``aten.randn.generator``; empty where no PyTorch op is involved."""
    module: str | None
    """Path of the innermost module that was running; None outside a module."""
    occurrence: int
    """Which call of this op at this line, 1-based."""
    cause: Cause
    explanation: str
    """One sentence: what differed, and why."""
    on: On | None = None
    """What the result depends on, where that is known; of a ``"control_flow"``, the value that decides the branch."""
    further: tuple[Dependence, ...] = ()
    """What else the op depends on, and still will when this cause is repaired."""
    other: Location | None = None
    """A second line: where the data comes from, where the branch is decided, where the memory is read, or, if none of these is known,
    the line that the other run executed."""
    phase: str = "forward"
    """``"forward"`` or ``"backward"``."""

    @property
    def fix_at(self) -> Location | None:
        """The line that the fix changes: where the difference comes from, if that is known; of memory, where it is made."""
        return self.location if self.cause == "uninitialized_memory" else self.other or self.location


@dataclass(frozen=True, kw_only=True)
class Dependence(Finding):
    """A difference between this run and other runs of the same cell that changes its results."""

    on: On
    op: str
    """The first op whose result changes and reaches the results of the cell; empty where no PyTorch op is involved."""
    module: str | None = None
    other: Location | None = None
    """Of carried state: where the next run first differs."""
    what: str
    """A clause: subject, verb, object."""


@dataclass(frozen=True, kw_only=True)
class Warned(Finding):
    """An op without a deterministic implementation that ran in the cell."""

    op: str
    """The name in PyTorch's warning."""
    message: str
    count: int = 1
    """The number of calls at this line."""


@dataclass(frozen=True, kw_only=True)
class DeterministicReport(Report):
    """The report of one cell, or of the time between ``%deterministic`` and ``%deterministic off``."""

    seed: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """The settings that were changed, by name: the value before, and the value while the cell ran."""
    keep_rng: bool = False
    """Whether the generators keep the state in which the cell left them."""
    restored: bool = True
    """Whether everything was restored; with `keep_rng`, everything but the generators."""
    overruled: tuple[str, ...] = ()
    """Settings that the cell itself changed, and that were restored; a sentence each."""
    generators: tuple[str, ...] = ()
    """The user's own generators that were seeded, by name."""
    threads_count: int = 0
    """PyTorch's number of threads at the start; the rounding of sums may depend on it."""
    too_late: tuple[str, ...] = ()
    """Settings that cannot be changed any more in this process; a sentence each."""
    warnings: tuple[Warned, ...] = ()
    verified: bool | None = None
    """Whether two runs were bit-identical; None where they were not compared."""
    not_verified: str = ""
    """Why two runs could not be compared, where `verify` was asked for."""
    against: str = ""
    """What the run was compared with, if not with a second run of the cell."""
    rtol: float | None = None
    """The accepted relative difference; None where every bit was compared."""
    divergence: Divergence | None = None
    ops_count: int | None = None
    """The number of ops that were compared or recorded; None where no op was."""
    depends_on: tuple[Dependence, ...] = ()
    """What the results depend on besides the code and its data, most important first."""
    carried: tuple[str, ...] = ()
    """Names of variables that the next run of the cell finds changed and that change its results."""
    interrupted: bool = False
    """Whether an interrupt ended the further runs; what was found before the interrupt is in the report."""
    unchecked: tuple[str, ...] = ()
    """What an interrupt, or an internal failure, left untried; a phrase each, such as ``"other seeds"``."""
    runs_count: int = 0
    """The number of times the cell was run again to find the cause."""
    runs_s: float = 0.0
    """The duration of these runs."""
    unrestorable: tuple[str, ...] = ()
    """State that could not be restored for the second run, such as a consumed iterator; a name or a phrase each."""
    fingerprint: Fingerprint | None = None
    """A digest of each op's result, for a later comparison; None where it was not recorded."""
    replica: ReplicaRecord | None = None
    """Of a rank in a distributed job: digests that are compared with those of the other ranks."""

    @property
    def verdict(self) -> str:
        """What differed, where, why, and the fix; or what holds."""
        said = dict(rows_of(self))
        parts = [_headline(self), said.get("why", ""), said.get("not compared", ""), f"fix: {said['fix']}" if "fix" in said else ""]
        if self.interrupted:
            parts.append(f"interrupted before {listed(self.unchecked)} could be checked" if self.unchecked else "interrupted")
        return " · ".join(filter(None, parts))

    @property
    def title(self) -> str:
        """What differed and where; or what holds."""
        return f"{_headline(self)} · interrupted" if self.interrupted else _headline(self)


@dataclass(frozen=True)
class LiveRitual:
    """The state of a session that is open."""

    seed: int
    settings_count: int
    generators: tuple[str, ...]
    """The user's own generators that were seeded, by name."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of random numbers, and its current state."""

    name: str
    kind: str
    is_global: bool = False
    """Whether a library draws from it by default."""
    seed: int | None
    """The seed; None where it is not known."""
    seeded: SeededBy
    state: str
    """A short digest of the state; it changes with each draw."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """A DataLoader, and the source of its workers' seeds."""

    name: str
    workers_count: int
    generator: str
    """The name or kind of its own generator; empty where it uses PyTorch's global one."""
    workers_alive: bool
    """Whether workers of an earlier loop are still running, with the seeds of that time."""


@dataclass(frozen=True, kw_only=True)
class StatusReport(Report):
    """Every source of randomness, and every setting on which reproducibility depends."""

    sources: tuple[Source, ...]
    settings: Mapping[str, object]
    """The determinism settings and their current values, by name."""
    loaders: tuple[Loader, ...]
    threads_count: int
    hash_seed: str
    """PYTHONHASHSEED at the start of the interpreter; ``"random"`` where the order of strings in sets differs with every start."""

    @property
    def verdict(self) -> str:
        """How many generators differ in every run, and which."""
        return f"{self.title}: {listed(names)}" if (names := self._from_entropy()) else self.title

    @property
    def title(self) -> str:
        """How many generators differ in every run."""
        many, count = plural(len(self.sources), "random number generator"), len(self._from_entropy())
        if not count:
            return f"{many}, none known to be seeded from entropy"
        return f"{count} of {many} {'is' if count == 1 else 'are'} seeded from entropy, different in every run"

    def _from_entropy(self) -> list[str]:
        return [f"`{source.name}`" for source in self.sources if source.seeded == "entropy"]


@dataclass(frozen=True)
class ReplicaRecord:
    """Digests of the weights, buffers and batches of this process at a few steps."""

    moments: tuple[Moment, ...] = ()
    samples: tuple[Samples, ...] = ()
    details: Mapping[tuple[RankFindingKind, int | None], Details] = field(default_factory=dict, repr=False, compare=False)
    """Digests by tensor name; they stay in the process, because there may be a million."""

    def __getstate__(self) -> dict[str, object]:
        return {"moments": self.moments, "samples": self.samples, "details": {}}


def compared(report: DeterministicReport) -> Compared:
    """Its batches, weights and buffers at some steps; and whether it differs from an earlier run."""
    replica = report.replica or ReplicaRecord()
    worked = bool(report.replica is not None or report.ops_count or report.warnings)
    found_at = (0, 0) if report.verified is False else None
    return Compared(worked=worked, found_at=found_at, moments=replica.moments, samples=replica.samples, details=replica.details)


# --- in words -------------------------------------------------------------------------------------------------------------------

_CAUSES: Final[Mapping[Cause, str]] = {
    "unseeded_generator": "unseeded torch generator",
    "python_random": "unseeded Python random",
    "numpy_random": "unseeded NumPy generator",
    "wall_clock": "the clock is read",
    "os_entropy": "the system's entropy is read",
    "hash_order": "hashes or memory addresses are used",
    "control_flow": "the runs took different branches",
    "uninitialized_memory": "uninitialized memory is read",
    "nondeterministic_op": "nondeterministic op",
    "worker_seed": "unseeded DataLoader workers",
    "state_leak": "the first run changed the input",
    "outside_data": "input from outside PyTorch",
}
_AGAINST: Final[Mapping[Cause, str]] = {
    "unseeded_generator": "random draws",
    "nondeterministic_op": "same inputs, different result",
    "outside_data": "input from outside PyTorch",
}
"""Causes that a comparison with an earlier run can name; an edited line speaks for itself."""
_ONLY: Final[Mapping[str, str]] = {
    "seed": "Reproducible only with the seed set here",
    "settings": "Reproducible only with the determinism settings set here",
    "order": "Same numbers twice, but they depend on an arbitrary order",
    "entropy": "Same numbers in this process, different ones in the next",
    "race": "Same numbers twice, but a nondeterministic op ran",
}
"""By what the numbers depend on most."""
_NEXT_TIME = "Same numbers twice, but different when the cell runs again"
_LONGEST_NAME = 24
"""Of an earlier run in a title: its file may lie deep."""
Lines: TypeAlias = "tuple[Location | None, Location | None, str]"
"""The line to change, a second one that belongs to it, and what that one is."""


def rows_of(report: DeterministicReport) -> tuple[tuple[str, str], ...]:
    """Name and text of what belongs to the title: what to change, and why."""
    if report.divergence is not None:
        why, fixes = report.divergence.explanation, [report.divergence.fix, *(one.fix for one in report.divergence.further)]
    elif report.verified and report.depends_on:
        first = report.depends_on[0]
        why, fixes = first.what, [_placed(one, first) for one in report.depends_on if one.on == first.on]
    elif report.verified is None and report.warnings:
        warned = report.warnings[0]
        why, fixes = f"PyTorch has no deterministic implementation of `{warned.op}`", [warned.fix]
    else:
        why, fixes = "", []
    rows = {"fix": "; ".join(dict.fromkeys(filter(None, fixes))), "why": why, "not compared": report.not_verified}
    return tuple((name, text) for name, text in rows.items() if text)


def lines_of(found: Divergence | Dependence, *, of_another: bool = False) -> Lines:
    """The line to change first. `of_another`: the run is compared with an earlier one, and not with a second run of itself."""
    here, other = found.location, None if found.other == found.location else found.other
    cause = getattr(found, "cause", "")
    if of_another or not cause:
        label = "the earlier run's line" if cause == "control_flow" else "where the numbers first differ" if not cause else "a related line"
        return (here, other, label)
    if other is None:
        return (here, None, "")
    if cause == "uninitialized_memory":
        return (here, other, "where the memory is read")
    if cause == "control_flow" and not found.fix:
        return (here, other, "where the other run went")
    return (other, here, "where the numbers first differ")


def standing(location: Location | None) -> str:
    """A line and its text; empty where it is not known."""
    return "" if location is None else _with_text(location, str(location))


def _placed(found: Dependence, first: Dependence) -> str:
    """The fix of a line that the page does not show, with its place."""
    place = None if found.location is None or found.location == first.location else found.location.place
    return found.fix if place is None else found.fix.replace("this line", place)


def _with_text(location: Location, place: str) -> str:
    return f"{place}: `{location.source}`" if location.source and "`" not in location.source else place


def _headline(report: DeterministicReport) -> str:
    differs = f"Different from {_name(report.against)}" if report.against else "Different every run"
    if report.divergence is not None:
        what, where = _what(report, report.divergence), lines_of(report.divergence, of_another=bool(report.against))[0]
        return f"{differs}{f': {what}' if what else ''}{_at(where)}"
    if report.verified is False:
        return f"{differs}: no PyTorch op could be identified as the cause"
    if report.verified:
        return _agreement(report)
    return f"{_met(report) or _settings(report)}{' · runs not compared' if report.not_verified else ''}"


def _what(report: DeterministicReport, found: Divergence) -> str:
    if report.against:
        return _AGAINST.get(found.cause, "")
    if found.cause == "outside_data" and found.on is not None:
        return "results arrive in varying order" if found.on == "order" else "the order of threads varies"
    return _CAUSES.get(found.cause, found.op)


def _name(against: str) -> str:
    """A file without its folders."""
    short = against.replace("\\", "/").rsplit("/", 1)[-1]
    return short if len(short) <= _LONGEST_NAME else f"...{short[-_LONGEST_NAME:]}"


def _agreement(report: DeterministicReport) -> str:
    if not report.ops_count and not report.depends_on:
        return f"Seeded with {report.seed}; no PyTorch op ran, so there was nothing to compare"
    if report.depends_on and not report.against:
        first = report.depends_on[0]
        return f"{_ONLY.get(first.on, _NEXT_TIME)}{_at(first.location)}"
    whom = f"as {_name(report.against)}" if report.against else "twice"
    how = "bit-identical" if report.rtol is None else f"equal to within {report.rtol:g}"
    ops = f": {plural(report.ops_count, 'op')} {'is' if report.ops_count == 1 else 'are'} {how}" if report.ops_count else ""
    return f"Same numbers {whom}{ops} (seed {report.seed})"


def _met(report: DeterministicReport) -> str:
    """What torch itself has warned of."""
    if not report.warnings:
        return ""
    many, first = len(report.warnings), report.warnings[0]
    what = f"Nondeterministic op {first.op}" if many == 1 else f"{many} nondeterministic ops, first {first.op}"
    return f"{what}{_at(first.location)}"


def _settings(report: DeterministicReport) -> str:
    seeded = f"Seeded with {report.seed}"
    if not report.restored:
        return f"{seeded}; not every setting could be restored"
    if not report.settings:
        return f"{seeded}; no setting had to change"
    return f"{seeded}; {plural(len(report.settings), 'setting')} changed and restored{', RNG states kept' if report.keep_rng else ''}"


def _at(location: Location | None) -> str:
    """A line and its text, at the end of a title: without the name of its function."""
    return "" if location is None else f" · {_with_text(location, location.place)}"
