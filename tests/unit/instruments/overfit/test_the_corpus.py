"""The corpus against plain torch alone: each fault stalls, each repair learns, each healthy training gets to its floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.overfit import healthy, planted

if TYPE_CHECKING:
    from tests.unit.instruments.overfit.case import Case

pytestmark = pytest.mark.corpus

CAUSES = {
    "frozen", "learning_rate", "reduction", "double_softmax", "wrong_loss_input", "target_shape", "off_by_one_labels", "conflicting_labels",
    "dead_units", "bad_init", "stale_optimizer", "cut_graph", "zero_grad_missing", "weight_decay", "clipping", "batchnorm_of_one",
    "output_ignores_input", "input_scale", "capacity",
}  # fmt: skip


def named(cases: tuple[Case, ...]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", named(planted.CASES))
def test_a_fault_stalls_and_its_repair_learns(case: Case) -> None:
    assert case.stalls(case.build())
    assert case.check_fix(case.build())


def test_every_cause_is_planted() -> None:
    assert {cause for case in planted.CASES for cause in case.causes} == CAUSES
    assert len({case.name for case in planted.CASES}) == len(planted.CASES) >= 50


@pytest.mark.parametrize("case", named(healthy.CASES))
def test_a_healthy_training_gets_to_its_floor(case: Case) -> None:
    assert case.learns(case.build()) is case.passes


def test_healthy_trainings_are_of_many_kinds() -> None:
    assert len({case.name for case in healthy.CASES}) == len(healthy.CASES) >= 35
    assert not any(case.causes for case in healthy.CASES)
