"""Why the forward broke, in one sentence, how the mismatching tensor came about, and what to change."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING

import torch

from torchdebug_magics.instruments.shapes.repair.facts import Facts, facts_of, facts_of_op
from torchdebug_magics.instruments.shapes.repair.history import steps
from torchdebug_magics.instruments.shapes.repair.rules import Diagnosis, diagnosis
from torchdebug_magics.instruments.shapes.repair.search import fixes
from torchdebug_magics.instruments.shapes.repair.sizes import fitting_sizes
from torchdebug_magics.instruments.shapes.repair.trial import Trials
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Step
from torchdebug_magics.probing.where import is_user_code, location

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.examine import Seen
    from torchdebug_magics.instruments.shapes.ops import Failed, Made
    from torchdebug_magics.report import Location

__all__ = ["diagnosed", "explained", "of_op", "place"]

_SHOWN = 5
_QUICK_FLOPS = 2e9
_TOO_SLOW_S = 4.0
"""Twice the two seconds that a trial may take: the first run of a process also imports what fakes need."""


def explained(seen: Seen) -> Failure:
    """The failure of a run; its fixes tried on the model, which stays as it is."""
    assert seen.error is not None
    facts = facts_of(seen.run, seen.error)
    return diagnosed(facts, seen.error, reached=seen.run.reached, trials=_trials(seen))


def diagnosed(facts: Facts, error: BaseException, *, reached: int = 0, trials: Trials | None = None) -> Failure:
    """The failure that these facts tell of, in the words of `error`. Without `trials` the fixes are not tried."""
    found = diagnosis(facts)
    return Failure(
        module=facts.path,
        op=facts.op,
        location=place(facts.error),
        operand_shapes=tuple(one.sizes for one in facts.operands),
        operand_names=tuple(one.name for one in facts.operands),
        explanation=found.sentence,
        fixes=_fixes(facts, found, reached, trials),
        error=f"{type(error).__name__}: {error}",
        chain=chain(_history(facts, found)),
    )


def of_op(failed: Failed, error: BaseException) -> Failure:
    """The failure of an op alone, outside every model: its fixes are not tried."""
    return diagnosed(facts_of_op(failed, error), error)


def _fixes(facts: Facts, found: Diagnosis, reached: int, trials: Trials | None) -> tuple[Fix, ...]:
    tried: tuple[Fix, ...] = ()
    # What goes wrong in a trial is no reason to say nothing.
    with contextlib.suppress(Exception):
        tried = fixes(found.edits, facts, reached, trials)
        if trials is not None:
            tried = (*tried, *fitting_sizes(facts, found, trials))
    verified = tuple(fix for fix in tried if fix.verified)
    return (verified or tried)[:_SHOWN]


def _trials(seen: Seen) -> Trials | None:
    """On fakes, save for scripted parts; none where only a long run would tell."""
    if seen.run.took_s > _TOO_SLOW_S:
        return None
    scripted = any(isinstance(one, torch.jit.ScriptModule) for one in seen.model.modules())
    return None if scripted and seen.run.flops > _QUICK_FLOPS else Trials(seen.model, seen.inputs, real=scripted)


def place(error: BaseException) -> Location | None:
    """The user's own line, the innermost one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame.f_code):
            found = location(frame.f_code.co_filename, line, frame.f_code.co_name)
    return found


def _history(facts: Facts, found: Diagnosis) -> Made | None:
    if found.culprit is not None and found.culprit.made is not None:
        return found.culprit.made
    return next((one.made for one in facts.operands if one.made is not None), None)


def chain(made: Made | None) -> tuple[Step, ...]:
    """The ops that a tensor came through, from the input on."""
    return tuple(_step(one) for one in reversed(list(steps(made))))


def _step(made: Made) -> Step:
    line = made.line
    where = location(line[0].co_filename, line[1], line[0].co_name) if line is not None else None
    return Step(
        op=made.op, module=made.module, input_shapes=tuple(sizes for sizes, _ in made.inputs), output_shape=made.shape, location=where
    )
