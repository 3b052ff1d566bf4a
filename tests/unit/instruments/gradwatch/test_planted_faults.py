"""Each planted fault is the finding: its kind, step, module and line; both doors say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from tests.unit.instruments.gradwatch.planted_faults import FAULTS
from torchdebug_magics.instruments.gradwatch.report import GradKind

if TYPE_CHECKING:
    from tests.doors import Observe
    from tests.unit.instruments.gradwatch.training_case import Fault


@pytest.mark.parametrize(
    ("fault", "observe"),
    [pytest.param(fault, ("magic", "function")[number % 2], id=fault.name) for number, fault in enumerate(FAULTS)],
    indirect=["observe"],
)
def test_the_fault_is_named(fault: Fault, observe: Observe) -> None:
    observed = observe("gradwatch", fault.body)
    assert observed.error is None
    report = observed.report
    assert report.problems == ()
    assert report.finding is not None, report.verdict
    assert fault.wrong(report.finding) == [], report.finding
    assert report.found
    assert report.finding is report.findings[0]


def test_there_is_one_of_each_kind() -> None:
    of_a_trial = {"stalled"}  # which `%%torchdebug` alone makes: see watch/test_tried_fixes.py
    assert {fault.kind for fault in FAULTS} == set(get_args(GradKind)) - of_a_trial


def test_divergence_is_said_before_the_nan(observe: Observe) -> None:
    fault = next(one for one in FAULTS if "NaN after" in one.name)
    report = observe("gradwatch", fault.body).report
    assert report.nonfinite_step is not None
    assert report.finding.last_step < report.nonfinite_step
