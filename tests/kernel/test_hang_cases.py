"""Every planted hang as a person meets it, in real kernels with `%%hangwatch` above the cell; some on each stack."""

from __future__ import annotations

import pytest

from tests.hang_cases import HangCase, all_cases
from tests.hang_cases.door import Outcome, run_all

CASES = all_cases()
_TRIES = 2
ON_COLAB = [case for case in CASES if not case.needs][1::4]
RUNS = [pytest.param(stack, case, id=f"{stack}-{case.name}") for stack, cases in (("modern", CASES), ("colab", ON_COLAB)) for case in cases]

# The first test of a stack waits for all of its cells, which run beside each other.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, Outcome]]:
    """Of the cases that were asked for, by stack and name; filled when the first of a stack is wanted."""
    return {}


@pytest.fixture(scope="session")
def on(request: pytest.FixtureRequest, outcomes: dict[str, dict[str, Outcome]]) -> dict[str, Outcome]:
    stack = request.param
    if stack not in outcomes:
        asked = [item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        cases = [params["case"] for params in asked if params["on"] == stack]
        outcomes[stack] = {outcome.case.name: outcome for outcome in run_all(cases, stack)}
    return outcomes[stack]


@pytest.mark.parametrize(("on", "case"), RUNS, indirect=["on"])
def test_the_cell_ends_and_the_report_is_true(on: dict[str, Outcome], case: HangCase) -> None:
    outcome = on[case.name]
    for _ in range(_TRIES):  # a busy machine may have cut a look short: once more, with fewer beside it
        if outcome.differs and not outcome.false_alarm:
            (outcome,) = run_all([case], outcome.stack, kernels=1)
    said = [outcome.report["verdict"], *outcome.report["problems"]] if outcome.report else [outcome.ran.traceback]
    assert not outcome.differs, "\n".join([*(f"{name}: {text}" for name, text in outcome.differs.items()), *said])


def test_a_third_is_not_stuck() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum("stuck" not in case.state for case in CASES) >= len(CASES) / 3
