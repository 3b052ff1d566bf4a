"""Each planted fault is named with the one change that makes the training learn, and nothing of the trials is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import torchdebug_magics
from tests.unit.instruments.overfit.planted import CASES
from tests.unit.instruments.overfit.state import state_of

if TYPE_CHECKING:
    from tests.unit.instruments.overfit.case import Case

pytestmark = pytest.mark.corpus


@pytest.mark.keeps_rng
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_is_named(case: Case) -> None:
    built = case.build()
    before = state_of(built["values"])
    report = torchdebug_magics.overfit(*built["values"], **built["options"])
    assert state_of(built["values"]) == before
    assert not report.passed
    assert report.cause in case.causes, report.verdict
    assert report.fix
    assert report.problems == () or all("optimizer" in problem for problem in report.problems)
    if case.factor is not None:
        assert report.factor is not None
        assert case.factor[0] <= report.factor <= case.factor[1]
    if case.parameters is not None:
        assert set(report.parameters) == set(case.parameters)
    if case.rows is not None:
        assert set(report.rows) == set(case.rows)
    if case.location_text is not None:
        assert report.location is not None
        assert case.location_text in report.location.source
    if report.verified:
        assert report.trials[-1].learns
        assert len(report.cured_losses) == report.trials[-1].steps
