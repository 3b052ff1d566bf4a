"""Healthy trainings of many kinds learn their samples, and no fault is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import torchdebug_magics
from tests.unit.instruments.overfit.healthy import CASES
from tests.unit.instruments.overfit.state import state_of

if TYPE_CHECKING:
    from tests.unit.instruments.overfit.case import Case

pytestmark = pytest.mark.corpus


@pytest.mark.keeps_rng
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_found(case: Case) -> None:
    built = case.build()
    before = state_of(built["values"])
    report = torchdebug_magics.overfit(*built["values"], **built["options"])
    assert state_of(built["values"]) == before
    assert report.cause is None, report.verdict
    assert report.passed or not case.passes, report.verdict
