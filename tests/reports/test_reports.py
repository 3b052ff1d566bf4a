"""Every real report: the magic gives the accepted answer, and the fix that it shows, applied, ends the fault."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.reports import ReportCase, all_reports
from tests.reports.answers import ANSWERS
from tests.reports.door import close, compare, run

CASES = all_reports()
ASKED = [case for case in CASES if not case.defeated_by]


def wrong(case: ReportCase) -> dict[str, str]:
    """Each thing that is not as the accepted answer has it, with what was got."""
    answer = ANSWERS[case.magic]
    differs = compare(case, run(case), answer)
    if not case.fixed:
        return differs
    after = run(case, repaired=True)
    if after.crash or after.report is None:
        return differs | {"after the fix": after.crash or "no report"}
    if (got := answer(after.report)).found:
        return differs | {"after the fix": f"{after.report.verdict}\n{got.fix}"}
    return differs if after.works else differs | {"after the fix": f"{case.works} is not true"}


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.magic}-{case.name}") for case in ASKED])
def test_the_accepted_answer_is_given_and_its_fix_works(case: ReportCase) -> None:
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    differs = wrong(case)
    assert not differs, "\n".join(f"{name}: {text}" for name, text in differs.items())


def test_every_report_is_whole() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.source for case in CASES}) >= 60
    assert all(count >= 15 for count in Counter(case.magic for case in CASES).values())
    assert sum(bool(case.defeated_by) for case in CASES) <= len(CASES) / 10
    for case in CASES:
        assert case.source.startswith("https://"), case.name
        assert case.healthy or not case.line or case.places, case.name
        assert case.healthy or (case.fix and case.fixed), case.name
