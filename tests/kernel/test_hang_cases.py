"""Every planted hang as a person meets it, in real kernels with `%%hangwatch` above the cell; some on each stack."""

from __future__ import annotations

import pytest

from tests.hang_cases import HangCase, all_cases
from tests.hang_cases.door import Outcome, run_all

CASES = all_cases()
_TRIES = 2
SMOKE = (
    "lock_of_a_thread_that_sleeps", "asyncio_event_set_by_call_later", "report_loader_every_nth_batch_waits",
    "report_ranks_one_rank_has_nothing_left_to_do", "training", "stop_pressed_on_a_training",
)  # fmt: skip
"""On Colab's stack in every run; there a quarter of the others run where a change touches them."""
ON_COLAB = [case for case in [case for case in CASES if not case.needs][1::4] if case.name not in SMOKE]
RUNS = [
    *(pytest.param("modern", case, id=f"modern-{case.name}") for case in CASES),
    *(pytest.param("colab", case, id=f"colab-{case.name}", marks=pytest.mark.thorough) for case in ON_COLAB),
]

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
    check(on[case.name])


def test_some_on_the_stack_of_colab() -> None:
    outcomes = list(run_all([case for case in CASES if case.name in SMOKE], "colab", kernels=2))
    assert len(outcomes) == len(SMOKE)
    for outcome in outcomes:
        check(outcome)


def check(outcome: Outcome) -> None:
    for _ in range(_TRIES):  # a busy machine may have cut a look short: once more, with fewer beside it
        if outcome.differs and not outcome.false_alarm:
            (outcome,) = run_all([outcome.case], outcome.stack, kernels=1)
    said = [outcome.report["verdict"], *outcome.report["problems"]] if outcome.report else [outcome.ran.traceback]
    assert not outcome.differs, "\n".join([*(f"{name}: {text}" for name, text in outcome.differs.items()), *said])


def test_a_third_is_not_stuck() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum("stuck" not in case.state for case in CASES) >= len(CASES) / 3
