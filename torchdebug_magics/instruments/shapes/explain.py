"""Explains a failed forward: the cause in one sentence, the ops that computed the mismatching tensor, and fixes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch

from torchdebug_magics.instruments.shapes.follow.seen import Made, Seen
from torchdebug_magics.instruments.shapes.follow.suspects import underlined_at
from torchdebug_magics.instruments.shapes.repair.failure_facts import FailureFacts, facts_of
from torchdebug_magics.instruments.shapes.repair.fix_search import fixes
from torchdebug_magics.instruments.shapes.repair.rules import Diagnosis, diagnosis
from torchdebug_magics.instruments.shapes.repair.size_history import steps
from torchdebug_magics.instruments.shapes.repair.source import traces
from torchdebug_magics.instruments.shapes.repair.trial import Trials, fitting_sizes
from torchdebug_magics.instruments.shapes.report import Failure, Fix, Shape, Step
from torchdebug_magics.probing.source.user_code import Owner, locate, location, owner, user_frame
from torchdebug_magics.report import Edit, Location

_SHOWN = 5
_QUICK_FLOPS = 2e9
_TOO_SLOW_S = 4.0
"""Twice the two seconds that a trial may take: the first run of a process also imports what fakes need."""
_WAITED_TOO_LONG_S = 3 * _TOO_SLOW_S
"""The limit by the clock, for a forward that waits rather than computes."""


def explained(seen: Seen) -> Failure:
    """The failure of a run; its fixes tried on the model, which stays as it is. Errors of this package are noted in `seen`."""
    assert seen.error is not None
    facts, trials = facts_of(seen.run, seen.error), _trials(seen)
    failure = diagnosed(facts, seen.error, reached=seen.run.reached, trials=trials)
    seen.problems += [*facts.guard.problems, *(trials.guard.problems if trials is not None else ())]
    return failure


def diagnosed(facts: FailureFacts, error: BaseException, *, reached: int = 0, trials: Trials | None = None) -> Failure:
    """Build the failure from these facts, with the text of `error`. Without `trials` the fixes are not tried."""
    cause = diagnosis(facts)
    failure = refusal(
        facts.error,
        cause.sentence,
        op=facts.op,
        sizes=[operand.sizes for operand in facts.operands],
        names=tuple(operand.name for operand in facts.operands),
        fixes=_fixes(facts, cause, reached, trials),
    )
    operands = ([cause.culprit] if cause.culprit is not None else []) + list(facts.operands)
    made = next((operand.made for operand in operands if operand.made is not None), None)
    return replace(failure, module=facts.path, error=f"{type(error).__name__}: {error}", chain=chain(made))


def refusal(
    error: BaseException,
    sentence: str,
    *,
    op: str | None = None,
    sizes: Sequence[Shape] = (),
    names: tuple[str, ...] = (),
    fixes: Sequence[Fix] = (),
) -> Failure:
    """Describe as a failure what was refused outside any module."""
    return Failure(
        module=None,
        op=op,
        location=place(error),
        underlined=underlined(error),
        operand_shapes=tuple(sizes),
        operand_names=names,
        explanation=sentence,
        fixes=tuple(fixes),
        error=f"{type(error).__name__}: {error}",
    )


def edited(error: BaseException, sentence: str, edits: Sequence[Edit]) -> Failure:
    """A failure whose cause is where the first of these edits is made, which were not tried; without edits, where it raised."""
    if not edits:
        return refusal(error, sentence)
    first = edits[0]
    new = [line.strip() for edit in edits for line in edit.new.split("\n") if line.strip() and line not in edit.old.split("\n")]
    fix = Fix(code="\n".join(new), verified=False, changes=tuple(edits))
    where = Location(cell=first.cell, file=first.file, line=first.line, function="", source=(first.old or first.new).partition("\n")[0])
    return replace(refusal(error, sentence, fixes=[fix]), location=where, underlined=None)


def _fixes(facts: FailureFacts, cause: Diagnosis, reached: int, trials: Trials | None) -> tuple[Fix, ...]:
    tried = facts.guard.run("the search for a fix", fixes, cause.edits, facts, reached, trials) or ()
    if trials is not None:
        tried += facts.guard.run("the search for sizes that fit", fitting_sizes, facts, cause, trials) or ()
    verified = tuple(fix for fix in tried if fix.verified)
    return (verified or tried)[:_SHOWN]


def _trials(seen: Seen) -> Trials | None:
    """On fakes, save for scripted parts; none where only a long run would tell."""
    if seen.run.computed_s > _TOO_SLOW_S or seen.run.took_s > _WAITED_TOO_LONG_S:
        return None
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in seen.model.modules())
    return None if scripted and seen.run.flops > _QUICK_FLOPS else Trials(seen.model, seen.inputs, real=scripted)


def place(error: BaseException) -> Location | None:
    """The innermost line of the user's code; else that of a library, and else the line that called for the report."""
    if (trace := innermost(error)) is not None:
        return location(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name)
    asking = user_frame(sys._getframe())
    where = locate(asking) if asking is not None else None
    return None if where is None or where.source.startswith("get_ipython()") else where


def underlined(error: BaseException) -> tuple[int, int] | None:
    """The failing expression as (start, end) in the source of `place`; None before Python 3.11, and where it is the whole line."""
    trace = innermost(error)
    return underlined_at(trace.tb_frame.f_code, trace.tb_lineno, trace.tb_lasti) if trace is not None else None


def innermost(error: BaseException, owners: Sequence[Owner] = ("user", "library")) -> TracebackType | None:
    """The innermost frame in a traceback of the code of the first of these owners that has one there."""
    places = {owner(trace.tb_frame.f_code.co_filename): trace for trace in traces(error)}
    return next((places[each] for each in owners if each in places), None)


def chain(made: Made | None) -> tuple[Step, ...]:
    """The ops that computed a tensor, from the input on."""
    history = [(step, tuple(sizes for sizes, _ in step.inputs)) for step in steps(made)]
    return tuple(
        Step(op=step.op, module=step.module, input_shapes=given, output_shape=step.shape, location=step.location)
        for step, given in reversed(history)
    )
