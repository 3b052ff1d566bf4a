"""The cause by name of a line at which two runs began to differ, a sentence on it, and the repair."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torchdebug_magics.instruments.deterministic.origin.line_origin import ON, Origin
from torchdebug_magics.instruments.deterministic.origin.lines.nondeterminism_sources import OF_THREADS, OF_TORCH
from torchdebug_magics.instruments.deterministic.origin.repairs import quoted, repair
from torchdebug_magics.instruments.deterministic.origin.sentences import sentence
from torchdebug_magics.instruments.deterministic.origin.step_questions import differing, has_address
from torchdebug_magics.probing.where import location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.backward_slice import Beginning, Slicer
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Source, Step
    from torchdebug_magics.instruments.deterministic.origin.lines.written_files import Files
    from torchdebug_magics.instruments.deterministic.origin.pairing import Pairing
    from torchdebug_magics.instruments.deterministic.report import Cause
    from torchdebug_magics.report import Location

__all__ = ["Judge", "branch_after"]

_INDEPENDENT = frozenset({"os_entropy", "wall_clock", "numpy_random", "python_random"})
"""Each differs by itself: one that is repaired leaves the others."""
_SHARPEST = (
    "worker_seed",
    "numpy_random",
    "unseeded_generator",
    "python_random",
    "os_entropy",
    "uninitialized_memory",
    "wall_clock",
    "hash_order",
    "state_leak",
    "outside_data",
)
"""Where a line asked several: a generator that seeds itself asks the system, too, and a file is read by `next`."""


class Judge:
    """Of two runs."""

    def __init__(self, pairing: Pairing, files: Files, slicer: Slicer) -> None:
        self._pairing = pairing
        self._files = files
        self._slicer = slicer

    def origin(self, beginning: Beginning) -> Origin:
        """What to tell of it."""
        if beginning.fork is not None:
            return self._of_fork(beginning)
        sources = self._sources(beginning.step)
        cause = self._cause(beginning, sources)
        others = dict.fromkeys(one.cause for one in sources if one.cause in _INDEPENDENT and cause in _INDEPENDENT and one.cause != cause)
        further = tuple(self._of_cause(beginning, sources, cast("Cause", other)) for other in others)
        return replace(self._of_cause(beginning, sources, cause), further=further)

    def _of_cause(self, beginning: Beginning, sources: list[Source], cause: Cause) -> Origin:
        step = beginning.step
        of_cause = [one for one in sources if one.cause == cause] or (sources if cause in {"worker_seed", "state_leak"} else [])
        line = next((one.line for one in of_cause if _holds(step, one.line)), step.line)
        names = self._names(beginning)
        told = tuple(dict.fromkeys(one.name for one in of_cause))
        return Origin(
            cause=cause,
            location=_location(step, line),
            names=names,
            sources=told,
            on="order" if told and OF_THREADS.issuperset(told) else "race" if step.activation.thread else ON.get(cause),
            explanation=sentence(cause, step, names, told, is_old=beginning.is_old, file=self._wrote(step)),
            fix=repair(cause, step, names, told),
        )

    def _of_fork(self, beginning: Beginning) -> Origin:
        fork = beginning.fork
        assert fork is not None
        after = fork.after
        behind = self._slicer.before(after) if after is not None and not fork.is_call else []
        origins = [self.origin(one) for one in behind if one.fork is None]
        told = next((one for one in origins if one.cause != "unknown"), None)
        one, other = fork.one or fork.other or beginning.step, fork.other
        is_cache = fork.is_call and after is not None and after.statement is not None and "cache" in after.statement.facts.values()
        at = after if after is not None and (is_cache or fork.is_call) else one
        is_turn = told is None and at.activation.thread != 0  # whose it is: threads do not go different ways by themselves
        cause: Cause = "state_leak" if is_cache else "outside_data" if is_turn else "control_flow"
        names = beginning.names or self._names(beginning)
        branch = None if after is None else _location(after, after.line)
        return Origin(
            cause=cause,
            location=_location(at, at.line),
            branch=None if after is None else branch_after(after),
            branch_head=branch,
            other=None if other is None or other is at else _location(other, other.line),
            decided=None if told is None else told.location,
            on="race" if at.activation.thread else None if told is None else told.on or ON.get(told.cause),
            names=names,
            sources=told.sources if told else (),
            explanation=sentence(cause, at, names, (), is_old=False, file="")
            if is_turn
            else _on_branch(branch, told, is_cache=is_cache, names=names),
            fix=told.fix if told else repair(cause, at, names, ()),
        )

    def _sources(self, step: Step) -> list[Source]:
        """The user's own asking first: what a library asks for is mostly for itself. Who hands over what comes first may be in order."""
        asked = [source for line in step.whole() for source in line.sources]
        found = [one for one in asked if one.name not in OF_THREADS] or asked
        nearest = min((one.distance for one in found), default=0)
        return [one for one in found if one.distance == nearest]

    def _cause(self, beginning: Beginning, sources: list[Source]) -> Cause:
        step = beginning.step
        facts = step.statement.facts if step.statement is not None else {}
        iterated = {facts.get(path, "") for path in step.statement.iterated} if step.statement is not None else set()
        if "workers" in iterated:
            return "worker_seed"
        if beginning.is_old or self._wrote(step):
            return "state_leak"
        if step.activation.thread and all(one.cause == "outside_data" for one in sources):
            return "outside_data"  # whose turn it is
        for cause in _SHARPEST:
            if any(one.cause == cause for one in sources):
                named = cast("Cause", cause)
                return (self._of_iteration(step, iterated) or named) if named == "state_leak" else named
        return self._of_iteration(step, iterated) or "unknown"

    def _of_iteration(self, step: Step, iterated: set[str]) -> Cause | None:
        is_of_set = "set" in iterated or (step.statement is not None and "{}" in step.statement.iterated)
        if is_of_set or _calls_for_address(step):
            return "hash_order"
        if "file" in iterated:
            assert step.statement is not None
            files = [path for path in step.statement.iterated if step.statement.facts.get(path) == "file"]
            return "outside_data" if all(map(self._slicer.history.is_bound, files)) else "state_leak"
        if "iterator" in iterated:
            return "state_leak"
        if step.statement is not None and any(path.startswith(("os.environ", "sys.argv")) for path in step.statement.paths):
            return "outside_data"
        return "hash_order" if has_address(step) else None

    def _wrote(self, step: Step) -> str:
        name = self._files.read_by(step.statement)
        return name if name in self._files.written else ""

    def _names(self, beginning: Beginning) -> tuple[str, ...]:
        """What differs after the line and did not before, as far as it was bound there; else what was asked for."""
        step = beginning.step
        partner = self._pairing.partner.get(step)
        if partner is None:
            return beginning.names
        new = tuple(path for path in step.after if path in partner.after and differing(step, partner, path) == (False, True))
        bound = step.statement.bound if step.statement is not None else frozenset()
        again = tuple(path for path in step.after if path in bound and path in partner.after and differing(step, partner, path)[1])
        found = tuple(dict.fromkeys((*new, *again)))
        return tuple(path for path in found if path != OF_TORCH) or found or beginning.names


def branch_after(step: Step) -> tuple[str, int, int] | None:
    """The file, and the first and the last line, of the statement that a line begins."""
    statement = step.statement
    return None if statement is None else (step.activation.code.co_filename, statement.first, statement.end)


def _calls_for_address(step: Step) -> bool:
    return step.statement is not None and any(path in {"id", "hash"} and path not in step.before for path in step.statement.paths)


def _holds(step: Step, line: int) -> bool:
    return step.statement is not None and step.statement.first <= line <= step.statement.last


def _location(step: Step, line: int) -> Location:
    code = step.activation.code
    return location(code.co_filename, line, code.co_name)


def _on_branch(branch: Location | None, told: Origin | None, *, is_cache: bool, names: tuple[str, ...]) -> str:
    what = f"{quoted(names)} differs because " if names else ""
    if is_cache:
        where = "" if branch is None else f" at line {branch.line}"
        return f"{what}the function called{where} is cached: the first run filled the cache, so the second did not run it"
    if branch is None:
        return f"{what}the two runs started with different lines"
    if told is None:
        return f"{what}the two runs took different branches after line {branch.line}"
    by = quoted(told.sources) or quoted(told.names)
    where = "" if told.location.line == branch.line else f" at line {told.location.line}"
    return f"{what}the branch taken after line {branch.line} depends on {by or 'what changed'}{where}"
