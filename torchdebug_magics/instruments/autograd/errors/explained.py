"""The error that ended a cell, as a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.at_the_line import at_the_line
from torchdebug_magics.instruments.autograd.errors.cut import cut_graph
from torchdebug_magics.instruments.autograd.errors.inplace import modified_in_place
from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.errors.second_backward import second_time

if TYPE_CHECKING:
    from torchdebug_magics.instruments.autograd.recording.tape import Tape
    from torchdebug_magics.instruments.autograd.report import Finding
    from torchdebug_magics.instruments.autograd.training_course import Course

__all__ = ["explained"]

_FROM_THE_GRAPH = {"inplace": modified_in_place, "second_backward": second_time, "cut": cut_graph}


def explained(error: BaseException, tape: Tape | None = None, course: Course | None = None) -> Finding | None:
    """None for an error that autograd did not raise. Nothing of the user's runs again."""
    raised = Raised.of(error, tape, course)
    return None if raised is None else _FROM_THE_GRAPH.get(raised.kind, at_the_line)(raised)
