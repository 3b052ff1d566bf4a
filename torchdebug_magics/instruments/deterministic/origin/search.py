"""Two runs of the same lines, compared: the first line on the way to an op at which they differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdebug_magics.instruments.deterministic.origin.blame import Judge
from torchdebug_magics.instruments.deterministic.origin.files import Files
from torchdebug_magics.instruments.deterministic.origin.pairing import Pairing
from torchdebug_magics.instruments.deterministic.origin.slicing import Beginning, Slicer
from torchdebug_magics.instruments.deterministic.origin.statements import Statements
from torchdebug_magics.instruments.deterministic.origin.tracer import Tracer

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.found import Origin
    from torchdebug_magics.instruments.deterministic.origin.recording import Run, Step
    from torchdebug_magics.probing.guard import Guard

__all__ = ["first_difference"]

_MOST_STEPS = 300_000
_MOST_RUNS = 4
"""Two may agree by chance, as far as the op: of twenty things one is drawn."""


def first_difference(
    run: Callable[[], object], restore: Callable[[], object], *, guard: Guard, drawn: object = None, most_steps: int = _MOST_STEPS
) -> Origin | None:
    """Run the user's body again and again, each time after `restore`, and name the line of theirs at which two runs begin to differ.

    A run that raises inside an op is looked at backwards from there: only what reached the op counts. `drawn` is a generator that the op
    draws from, whether its line names it or not. None where no line differs, or where none could be followed, which `guard` then notes. At
    most `most_steps` lines a run are kept, of about 1 KiB each.
    """
    if sys.gettrace() is not None:
        guard.note("the line at which the runs differ was not looked for: a debugger or a coverage tool follows the code")
        return None
    statements, files = Statements(), Files()
    first: Run | None = None
    for _ in range(_MOST_RUNS):
        restore()
        later = Tracer(statements, files, guard, most_steps).trace(run)
        if not later.is_whole:
            return None
        first, earlier = first or later, first
        found = guard.run("looking for the line at which the runs differ", _compared, earlier, later, files, drawn) if earlier else None
        if found is not None:
            return found
    return None


def _compared(first: Run, second: Run, files: Files, drawn: object) -> Origin | None:
    pairing = Pairing.of(first, second)
    slicer = Slicer(first, second, pairing)
    judge = Judge(pairing, files, slicer)
    end = _end(first, second, pairing)
    if end is None:
        return None
    found = [(judge.origin(one), one) for one in sorted(slicer.before(end, drawn=drawn), key=_order)]
    origins = [origin for origin, beginning in found if end is not first.stopped or not _is_bare(origin, beginning, end)]
    return next((one for one in origins if one.cause != "unknown"), origins[0] if origins else None)


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
