"""Healthy trainings of many kinds give no finding, and nothing fails in the watching."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.gradwatch.healthy_trainings import HEALTHY

if TYPE_CHECKING:
    from tests.doors import Observe
    from tests.unit.instruments.gradwatch.training_case import Training


_NUMBER = re.compile(r"\d[\d.e+-]*")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("training", "observe"),
    [pytest.param(training, ("magic", "function")[number % 2], id=training.name) for number, training in enumerate(HEALTHY)],
    indirect=["observe"],
)
def test_nothing_is_found(training: Training, observe: Observe) -> None:
    observed = observe("gradwatch", training.body)
    assert observed.error is None
    report = observed.report
    assert [finding.sentence() for finding in report.findings] == []
    assert report.problems == ()
    assert report.nonfinite_step is None
    assert report.steps_count > 0
    doubts = [_NUMBER.sub("1", doubt) for doubt in report.doubts]  # which digits there are is the machine's
    assert doubts == ([_NUMBER.sub("1", training.doubt)] if training.doubt else [])
    assert report.verdict.startswith("Gradients and updates look healthy") is not bool(training.doubt)
