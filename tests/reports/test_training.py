"""The reported trainings against plain torch: each stalls as reported, and learns once the answer is applied."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.reports.training import CASES, TrainingCase
from tests.unit.instruments.overfit.case import Built, Case, made

pytestmark = pytest.mark.corpus


def built(case: TrainingCase, *, repaired: bool) -> Built:
    """What the last cell hands to the magic, after the cells before it."""
    *cells, magic = case.repaired if repaired else case.cells
    namespace: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, case.name, "exec"), namespace)
    names = magic.removeprefix("%overfit ").partition(" -o ")[0].split()
    return made(*(eval(name, namespace) for name in names))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_it_stalls_and_the_answer_makes_it_learn(case: TrainingCase) -> None:
    training = Case(
        name=case.name, build=lambda: built(case, repaired=False), repair=lambda _: copy.copy(built(case, repaired=True)), cause=case.cause
    )
    assert training.stalls(training.build())
    assert training.check_fix(training.build())


def test_every_training_report_is_whole() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25
    assert len({case.source for case in CASES}) == len(CASES)
    assert all(case.fixed and case.fix for case in CASES)
