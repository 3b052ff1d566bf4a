"""Each planted fault is named with its lines, the user's error is the user's, and the cure ends it."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, get_args

import pytest

from tests.unit.instruments.autograd.planted import CASES
from torchdebug_magics.instruments.autograd.report import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark.structures import ParameterSet

    from tests.doors import Observe, Observed
    from tests.unit.instruments.autograd.case import Case
    from torchdebug_magics.instruments.autograd.report import AutogradFinding

_KINDS = get_args(Kind)
_RAISED = _KINDS[: _KINDS.index("other") + 1]
_NAMES = [case.name for case in CASES]


def by_turns(cases: Sequence[Case]) -> list[ParameterSet]:
    """Each case through one of the doors, the next through the other: what they share is tested for both elsewhere."""
    return [pytest.param(case, case.door or ("function", "magic")[number % 2], id=case.name) for number, case in enumerate(cases)]


def plainly(body: str) -> BaseException | None:
    """The error of the body without any magic."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            exec(compile(body, "<plain>", "exec", dont_inherit=True), {"__name__": "__main__"})
        except Exception as raised:
            return raised
    return None


def named(case: Case, observed: Observed) -> AutogradFinding | None:
    """The error that ended the cell, or the silent fault of that kind."""
    if case.kind in _RAISED:
        found: AutogradFinding | None = observed.report.finding
        return found
    return next((finding for finding in observed.report.findings if finding.kind in {case.kind, *case.kinds}), None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "observe"), by_turns(CASES), indirect=["observe"])
def test_the_fault_is_named(case: Case, observe: Observe) -> None:
    observed = observe("autograd", case.body)
    error, plain = observed.error, plainly(case.body)
    assert (type(error), str(error)) == (type(plain), str(plain))
    assert (error is not None) == (case.kind in _RAISED)
    finding = named(case, observed)
    assert finding is not None, [(found.kind, str(found.location)) for found in observed.report.findings]
    assert case.wrong(finding) == []
    assert finding.raised == (case.kind in _RAISED)
    assert finding.fix
    besides = {found.kind for found in observed.report.findings if not found.is_hint} - {case.kind, *case.kinds, *case.also}
    assert not besides
    assert observed.report.found
    assert observed.report.problems == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "observe"), by_turns([case for case in CASES if case.edits]), indirect=["observe"])
def test_nothing_is_found_after_the_cure(case: Case, observe: Observe) -> None:
    observed = observe("autograd", case.fixed)
    assert observed.error is None
    assert [(finding.kind, str(finding.location), finding.headline) for finding in observed.report.findings] == []
    assert observed.report.problems == ()


def test_each_kind_is_planted() -> None:
    assert set(_KINDS) == {case.kind for case in CASES}
    assert len(set(_NAMES)) == len(_NAMES)
