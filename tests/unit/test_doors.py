"""Both doors lead to the same report, let the user's error pass, and leave the same names behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.doors import Observe

BODY = """\
import torch
model = torch.nn.Linear(3, 1)
loss = model(torch.ones(2, 3)).sum()
loss = loss + (loss - loss).log()
loss.backward()
after = True
"""


def test_a_report_and_the_names_of_the_body(observe: Observe) -> None:
    seen = observe("nanhunt", "answer = given + 1\n", namespace={"given": 41})
    assert seen.error is None
    assert seen.namespace["answer"] == 42
    assert seen.report.found is False
    assert seen.report.verdict


def test_the_users_own_error_passes_and_the_report_is_there(observe: Observe) -> None:
    seen = observe("nanhunt", "before = 1\nraise LookupError('mine')\n")
    assert isinstance(seen.error, LookupError)
    assert seen.namespace["before"] == 1
    assert seen.report.found is False


def test_options_reach_the_instrument(observe: Observe) -> None:
    stopped, went_on = observe("nanhunt", BODY), observe("nanhunt", BODY, keep_going=True)
    assert type(stopped.error).__name__ == "NonFiniteError"
    assert went_on.error is None
    assert went_on.namespace["after"] is True
    assert stopped.report.found
    assert went_on.report.found


def test_lines_are_those_of_the_cell_or_file(observe: Observe) -> None:
    location = observe("nanhunt", BODY).report.finding.location
    assert location.line == 5
    assert location.source == "loss = loss + (loss - loss).log()"
