"""A bad batch that a data set made of good data: the op that did so, in the code that makes a sample."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchdebug_magics.instruments.nanhunt.replay.bad_step import bad_outputs
from torchdebug_magics.instruments.nanhunt.replay.conclusion import conclude
from torchdebug_magics.probing.rerun.attempt import CannotReplay
from torchdebug_magics.probing.tensors import is_bad, tensors_in

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.fixes.verified_fix import Again
    from torchdebug_magics.instruments.nanhunt.replay.bad_step import Inquiry, Outcome
    from torchdebug_magics.instruments.nanhunt.replay.op_trace import Trace
    from torchdebug_magics.instruments.nanhunt.report import Finding
    from torchdebug_magics.probing.rerun.step_rerun import StepRerun

__all__ = ["made_by_a_data_set"]

_MOST_ROWS = 20
"""As many as a finding keeps."""
_MOST_SAMPLES = 256
_MOST_READING_S = 2.0


def made_by_a_data_set(rerun: StepRerun[Trace], inquiry: Inquiry, outcome: Outcome, data: Finding) -> tuple[Outcome, Again | None]:
    """The outcome with the op named; where it made all rows bad, the finding about that op, and what reads the bad sample once more."""
    sources = list(rerun.recorder.batches.bad_sources())
    again: Again = partial(rerun.call, partial(_first_bad_sample, sources), sources)
    try:
        replayed = again()
    except CannotReplay:
        return outcome, None
    if not replayed.finished or not bad_outputs(replayed):
        return outcome, None
    made = conclude(inquiry, replayed, bad_outputs(replayed), "statements", lambda _: None, only_births=True)
    finding = made.finding
    if finding is None or finding.op is None or finding.location is None:
        return outcome, None
    if data.shape and len(data.rows) < min(data.shape[0], _MOST_ROWS):
        place = f"{finding.location}: `{finding.location.source}`"
        return replace(outcome, finding=replace(data, explanation=f"{data.explanation}; `{finding.op}` produced it, in {place}")), None
    return replace(made, finding=replace(finding, sink="loss"), reproduced=None), again


def _first_bad_sample(sources: list[Any]) -> object:
    """Read data sets again, from their beginning, up to the first bad sample."""
    sample, until = None, time.process_time() + _MOST_READING_S
    for source in sources:
        for place in range(min(len(source), _MOST_SAMPLES)):
            sample = source[place]
            if any(map(is_bad, tensors_in([sample]))) or time.process_time() > until:
                return sample
    return sample
