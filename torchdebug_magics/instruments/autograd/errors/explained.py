"""The error that ended a cell, as a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.instruments.autograd.errors.at_the_line import at_the_line
from torchdebug_magics.instruments.autograd.errors.cut import cut_graph
from torchdebug_magics.instruments.autograd.errors.inplace import modified_in_place
from torchdebug_magics.instruments.autograd.errors.raised import Raised
from torchdebug_magics.instruments.autograd.errors.second_backward import second_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.autograd.recording.tape import Tape
    from torchdebug_magics.instruments.autograd.report import Finding
    from torchdebug_magics.instruments.autograd.training_course import Course

__all__ = ["explained"]

_FROM_THE_GRAPH = {"inplace": modified_in_place, "second_backward": second_time, "cut": cut_graph}


def explained(error: BaseException, tape: Tape | None = None, course: Course | None = None) -> Finding | None:
    """Of an error, or of the one that it was raised from; None where autograd raised neither. Nothing of the user's runs again."""
    for one in _chain(error):
        raised = Raised.of(one, tape, course)
        if raised is not None:
            return _FROM_THE_GRAPH.get(raised.kind, at_the_line)(raised)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those while which it was raised."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
