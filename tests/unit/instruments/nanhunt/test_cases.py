"""Every planted case through the script door: the finding is the true one, and nothing was touched."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import torchdebug_magics
from tests.nan_cases import ANY, Case, Expect, Nothing, all_cases
from tests.nan_cases.door import compare, compare_location, plain, purity, raised, watch

CASES = all_cases()
OTHERS = (
    "backward_bad_custom_function", "nothing_scaler_with_accumulation", "number_autocast_bfloat16_large_exponent",
    "origin_attack_of_several_steps_and_a_bad_layer", "precision_bfloat16_square_overflows",
)  # fmt: skip
# Recording only: all that are about loops and side effects, and a few more.
RECORDED = [case for case in CASES if case.name.startswith(("flow_", "hard_", "optimizer_", "recipe_", "science_", "value_", "wild_"))]
RECORDED += [case for case in CASES if case.name in OTHERS]


def _named(cases: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in {case.name: case for case in cases}.items()]


@pytest.mark.parametrize("case", _named(CASES))
def test_the_finding_is_the_true_one_and_nothing_was_touched(case: Case) -> None:
    if case.needs:
        plain(case)  # the first import of a library may draw random numbers
    outcome = watch(case)
    assert outcome.report is not None
    differs = {
        **raised(case, outcome),
        **compare(case, outcome.report),
        **compare_location(case, outcome.report),
        **purity(case, outcome, plain(case)),
    }
    said = [outcome.report["verdict"], *outcome.report["problems"]]
    assert not differs, "\n".join([*(f"{name}: {text}" for name, text in differs.items()), *said])
    if isinstance(outcome.error, torchdebug_magics.NonFiniteError):
        finding = outcome.report["finding"]
        # A `finally` of the user's may still have updated the weights after the error was raised.
        assert str(outcome.error) == outcome.report["verdict"] or finding["weights"] == "weights updated since"
        assert (outcome.error.finding.op, outcome.error.finding.kind) == (finding["op"], finding["kind"])


@pytest.mark.parametrize("case", _named(case for case in RECORDED if case.pure and not case.options.get("keep_going")))
def test_keep_going_leaves_the_bits_of_a_plain_run(case: Case) -> None:
    outcome, measure = watch(case, keep_going=True), plain(case)
    assert outcome.report is not None
    assert type(outcome.error) is type(measure.error)
    assert not purity(case, outcome, measure)
    assert outcome.report["found"] is not isinstance(case.truth, Nothing)


def test_names_are_unique_and_every_line_that_is_checked_is_marked() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        place = case.place()
        if isinstance(case.truth, Expect) and case.truth.line is not ANY and case.truth.phases <= {"forward", "loss", "backward"}:
            assert place is not None, case.name
