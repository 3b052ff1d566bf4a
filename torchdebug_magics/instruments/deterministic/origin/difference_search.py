"""Two runs of the same lines, compared: the first line on the way to an op at which they differ."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from torchdebug_magics.instruments.deterministic.origin.backward_slice import Beginning, Slicer
from torchdebug_magics.instruments.deterministic.origin.line_causes import Judge, branch_after
from torchdebug_magics.instruments.deterministic.origin.line_statements import Statements
from torchdebug_magics.instruments.deterministic.origin.line_steps import Files, Run, Step
from torchdebug_magics.instruments.deterministic.origin.line_tracer import Tracer
from torchdebug_magics.instruments.deterministic.origin.nondeterminism_sources import OF_THREADS
from torchdebug_magics.instruments.deterministic.origin.pairing import Origin, Pairing
from torchdebug_magics.probing.safety import Guard

_MOST_STEPS = 300_000
_LEAST_RUNS = 4
"""Two may agree by chance, as far as the op: of twenty things one is drawn."""
_MOST_RUNS = 24
_MOST_S = 5.0
"""In all, of the runs beyond the least: short ones may be made more often."""


def first_difference(
    run: Callable[[], object],
    restore: Callable[[], object],
    *,
    guard: Guard,
    drawn: object = None,
    is_way: bool = False,
    most_steps: int = _MOST_STEPS,
    most_runs: int = _MOST_RUNS,
) -> Origin | None:
    """Run the user's body again and again, each time after `restore`, and name the line of theirs at which two runs begin to differ.

    A run that raises inside an op is looked at backwards from there: only what reached the op counts. `drawn` is a generator that the op
    draws from, whether its line names it or not. If `is_way`, other runs may not come to the op at all: what decides that counts, too.
    None where no line differs, or where none could be followed, which `guard` then notes. At most `most_steps` lines a run are kept, of
    about 1 KiB each.
    """
    if sys.gettrace() is not None:
        guard.note("the line at which the runs differ was not searched for: a debugger or a coverage tool is tracing the code")
        return None
    statements, files = Statements(), Files()
    first: Run | None = None
    begin_s = time.monotonic()
    for count in range(most_runs):
        if count >= _LEAST_RUNS and time.monotonic() - begin_s > _MOST_S:
            break
        restore()
        later = Tracer(statements, files, guard, most_steps).trace(run)
        if not later.is_whole:
            return None
        first, earlier = first or later, first
        if earlier is not None:
            look = _Look(earlier, later, files)
            found = guard.run("searching for the line at which the runs differ", look.origin, drawn, is_way=is_way)
            if found is not None:
                return found
    return guard.run("searching for uninitialized memory", _Look(first, first, files).unwritten) if first is not None else None


class _Look:
    """At two runs."""

    def __init__(self, first: Run, second: Run, files: Files) -> None:
        self._runs = first, second
        self._pairing = Pairing.of(first, second)
        self._slicer = Slicer(first, second, self._pairing, files)
        self._judge = Judge(self._pairing, files, self._slicer)

    def origin(self, drawn: object, *, is_way: bool) -> Origin | None:
        """The first line on the way to the op at which they differ."""
        first, second = self._runs
        end = _end(first, second, self._pairing)
        if end is None:
            return None
        found = [(self._judge.origin(one), one) for one in sorted(self._slicer.before(end, drawn=drawn), key=_order)]
        origins = [origin for origin, beginning in found if end is not first.stopped or not _is_bare(origin, beginning, end)]
        if not origins and is_way:
            origins = [one for head in _around(end) for one in self._of_head(head)]
        chosen = next((one for one in origins if one.cause != "unknown"), origins[0] if origins else None)
        if chosen is not None:
            others = tuple(one for one in origins if one.on is not None and one.location != chosen.location)
            chosen = replace(chosen, further=(*chosen.further, *others))
        if chosen is not None and chosen.on == "race" and (handing := self._handing()) is not None:
            return handing  # what threads do between their turns follows from whose turn it is
        return chosen

    def _handing(self) -> Origin | None:
        """The line of the main thread that takes from threads or processes what comes first."""
        steps = (step for step in self._runs[0].steps if not step.activation.thread)
        taking = next((step for step in steps if any(one.name in OF_THREADS for one in step.sources)), None)
        return None if taking is None else self._judge.origin(Beginning(taking))

    def unwritten(self) -> Origin | None:
        """The one line that took memory which nobody has written, if there is but one: it may hold the same in run after run."""
        asking = [step for step in self._runs[0].steps if any(one.cause == "uninitialized_memory" for one in step.sources)]
        if len({(step.activation.code, step.line) for step in asking}) != 1:
            return None
        statement = asking[0].statement
        return self._judge.origin(Beginning(asking[0], tuple(sorted(statement.bound)) if statement is not None else ()))

    def _of_head(self, head: Step) -> list[Origin]:
        found = [self._judge.origin(one) for one in self._slicer.before(head)]
        return [replace(one, decided=one.location, branch=branch_after(head)) for one in found if one.cause != "unknown"]


def _around(end: Step) -> Iterator[Step]:
    """The heads of the loops and branches that a line stands in, the innermost first."""
    statement = end.statement.parent if end.statement is not None else None
    while statement is not None:
        held = statement
        found = (step for step in reversed(end.activation.steps[: end.place]) if step.statement is held)
        yield from itertools.islice(found, 1)
        statement = statement.parent


def _end(first: Run, second: Run, pairing: Pairing) -> Step | None:
    """The line of the op; in runs that came to their end, the first that differs."""
    for stopped in (first.stopped, second.stopped):
        if stopped is not None and stopped in pairing.fork_of:
            return stopped
    if first.stopped is not None:
        return first.stopped
    if pairing.forks:
        fork = pairing.forks[0]
        return fork.one or fork.other
    return next((step for step in first.steps if step in pairing.partner and _differs(step, pairing.partner[step])), None)


def _differs(step: Step, partner: Step) -> bool:
    return any(path in partner.after and partner.after[path].digest != held.digest for path, held in step.after.items())


def _order(beginning: Beginning) -> int:
    fork = beginning.fork
    return fork.after.number if fork is not None and fork.after is not None else beginning.step.number


def _is_bare(origin: Origin, beginning: Beginning, end: Step) -> bool:
    """The line of the op itself, and nothing in it is known to differ."""
    return beginning.step is end and beginning.fork is None and origin.cause == "unknown" and not beginning.names
