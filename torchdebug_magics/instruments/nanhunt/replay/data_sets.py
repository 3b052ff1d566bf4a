"""A bad batch that was read from a data set: it is read again up to the first bad sample, to find the line that makes that bad."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from typing import Any

from torchdebug_magics.instruments.nanhunt.replay.conclusion import Inquiry, Outcome, bad_outputs, conclude
from torchdebug_magics.instruments.nanhunt.report import NanFinding, Sink
from torchdebug_magics.instruments.nanhunt.rerun.step_rerun import StepRerun
from torchdebug_magics.instruments.nanhunt.verified_fix import Again
from torchdebug_magics.probing.source.user_code import excerpt, is_user_code, location
from torchdebug_magics.probing.tensors import is_bad, tensors_in

_MOST_ROWS = 20
"""As many as a finding keeps."""
_MOST_SAMPLES = 256
_MOST_READING_S = 2.0
_NUMPY_FIXES = {
    "divide": "replace a divisor of 0 before this division, by 1 for example",
    "sqrt": "raise what this root is taken of to at least 0",
    "power": "raise the base of this power to at least 0",
    "log": "raise what this logarithm is taken of above 0",
}
"""By the first word of what NumPy calls the operation."""


def made_by_a_data_set(rerun: StepRerun, inquiry: Inquiry, outcome: Outcome, data: NanFinding) -> tuple[Outcome, Again | None]:
    """The outcome with the op named; where it made all rows bad, the finding about that op, and what reads the bad sample once more."""
    sources = list(rerun.recorder.batches.bad_sources())
    last: list[tuple[Any, int]] = []
    again: Again = partial(rerun.call, partial(_first_bad_sample, sources, last), sources)
    replayed = again()
    if not replayed.finished or not bad_outputs(replayed):
        return outcome, None
    if (of_numpy := _born_in_numpy(rerun, *last[-1], data)) is not data:
        return replace(outcome, finding=of_numpy), None
    made = conclude(inquiry, replayed, bad_outputs(replayed), "statements", lambda _: None, only_births=True)
    finding = made.finding
    if finding is None or finding.op is None or finding.location is None:
        return outcome, None
    if data.shape and len(data.rows) < min(data.shape[0], _MOST_ROWS):
        place = f"{finding.location}: `{finding.location.source}`"
        return replace(outcome, finding=replace(data, explanation=f"{data.explanation}; `{finding.op}` produced it, in {place}")), None
    return replace(made, finding=replace(finding, sink=Sink("loss")), reproduced=None), again


def _first_bad_sample(sources: list[Any], last: list[tuple[Any, int]]) -> object:
    """Read data sets again, from their beginning, up to the first bad sample; `last` gets where that is."""
    sample, until = None, time.process_time() + _MOST_READING_S
    for source in sources:
        for place in range(min(len(source), _MOST_SAMPLES)):
            sample, last[:] = source[place], [(source, place)]
            if any(map(is_bad, tensors_in([sample]))) or time.process_time() > until:
                return sample
    return sample


def _born_in_numpy(rerun: StepRerun, source: Any, place: int, data: NanFinding) -> NanFinding:
    """The finding at the line in which NumPy makes a sample bad; as it was where NumPy makes none."""
    errors: list[FloatingPointError] = []
    rerun.call(partial(_read_strictly, source, place, errors), [source])
    calls = traceback.walk_tb(errors[0].__traceback__) if errors else ()
    own = [(frame.f_code, line) for frame, line in calls if is_user_code(frame.f_code)]
    if not own:
        return data
    code, line = own[-1]
    where, said = location(code.co_filename, line, code.co_name), str(errors[0])
    operation = said.rpartition(" ")[2]
    return replace(
        data,
        location=where,
        excerpt=excerpt(where),
        underlined=None,
        explanation=f"`{where.source}` makes sample {place} of the data set non-finite: NumPy says {said}",
        fix=next(
            (fix for name, fix in _NUMPY_FIXES.items() if operation.startswith(name)), f"check what `{operation}` is given on this line"
        ),
    )


def _read_strictly(source: Any, place: int, errors: list[FloatingPointError]) -> None:
    """Read a sample while NumPy raises where it would warn."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return
    try:
        with numpy.errstate(invalid="raise", divide="raise"):
            source[place]
    except FloatingPointError as error:
        errors.append(error)
