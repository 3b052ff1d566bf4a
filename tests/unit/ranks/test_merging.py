"""Ranks put together: which was first, what the others are, and one line for those that tell the same."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.ranks.built import LINE, WELL, record, with_moments, without_report
from torchdebug_magics import catalog
from torchdebug_magics.html import plain
from torchdebug_magics.html.page import Table
from torchdebug_magics.ranks.compared import Moment
from torchdebug_magics.ranks.merging import held_details, merged, parted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchdebug_magics.ranks.compared import RankRecord
    from torchdebug_magics.ranks.report import RanksReport


def put_together(records: Sequence[RankRecord]) -> RanksReport:
    return merged("nanhunt", records, held_details(records))


def shown(report: RanksReport) -> str:
    return plain.render(catalog.instrument("nanhunt").page(report))


def test_the_first_rank_is_the_one_of_the_earliest_step() -> None:
    report = put_together([record(0), record(1, "NaN at step 9", found_at=(9, 1)), record(2, "NaN at step 3", found_at=(3, 4))])
    assert report.first == 2
    assert report.verdict == "Rank 2 of 3: NaN at step 3"
    assert report.sentence == report.verdict
    assert report.found
    assert report.rank(1).report is not None


def test_of_the_same_step_one_of_its_own_comes_before_one_that_was_received() -> None:
    records = [
        record(0, "NaN received", found_at=(3, 4), is_received=True),
        record(1, "NaN from sqrt in backward", found_at=(3, 4)),
        record(2, "NaN received", found_at=(3, 4), is_received=True),
    ]
    random.Random(1).shuffle(records)
    report = put_together(records)
    assert report.first == 1
    assert report.verdict == "Rank 1 of 3: NaN from sqrt in backward · ranks 0 and 2 received it with the averaged gradients"
    assert [one.rank for one in report.ranks] == [0, 1, 2]


def test_the_fields_are_those_of_the_first_rank_or_of_rank_0() -> None:
    assert put_together([record(1, "b"), record(0, "a")]).shown.sentence == "a"  # type: ignore[union-attr]
    assert put_together([record(0, "a"), record(1, "b", found_at=(0, 0))]).shown.sentence == "b"  # type: ignore[union-attr]
    with pytest.raises(AttributeError):
        put_together([without_report(0, state="died", exit_code=-9)]).steps_count  # noqa: B018
    with pytest.raises(KeyError):
        put_together([record(0)]).rank(4)


def test_all_is_well() -> None:
    report = put_together([record(rank) for rank in range(3)])
    assert (report.first, report.verdict) == (None, f"All 3 ranks: {WELL}")


def test_a_rank_that_died_is_in_the_verdict_and_one_that_was_ended_for_it_is_not() -> None:
    died = without_report(1, state="died", exit_code=-9, location=LINE)
    report = put_together([without_report(0, state="died", exit_code=-15), died])
    assert report.verdict == "Rank 1 was killed by SIGKILL at train.py:12 in train"


def test_a_rank_that_its_launcher_terminated_has_no_mark() -> None:
    report = put_together([without_report(0, state="died", exit_code=-15), without_report(1, state="died", exit_code=-9)])
    assert report.rank(0).verdict == "was terminated by its launcher (SIGTERM)"
    (table,) = (one for one in catalog.instrument("nanhunt").page(report).blocks if isinstance(one, Table))
    assert table.marked == {1}


def test_ranks_that_end_alike_are_named_together() -> None:
    error = {"state": "raised", "exit_code": 1, "error": "ValueError: no such class", "location": LINE}
    report = put_together([without_report(rank, **error) for rank in range(3)])
    assert report.verdict == "Ranks 0, 1 and 2 raised ValueError: no such class at train.py:12 in train"


def test_a_step_that_a_scaler_skipped_because_of_another_rank_is_not_by_design() -> None:
    cause = record(1, "NaN from sqrt in backward", found_at=(3, 4), found_backward=3)
    for skipped, is_named in (((1, 3), True), ((1, 2), False)):
        report = put_together([record(0, skipped_backwards=skipped), cause])
        assert ("rank 0 received it with the averaged gradients and skipped the step" in report.verdict) == is_named


def test_replicas_that_agree_are_said_to() -> None:
    records = [with_moments(rank, "replicas_part", {0: 1, 1: 2, 2: 3}) for rank in range(4)]
    assert put_together(records).verdict.startswith("The weights of all 4 ranks agree (compared after 2 steps) · All 4 ranks: ")


def test_what_differs_is_said_beside_what_was_found() -> None:
    records = [with_moments(rank, "replicas_part", {2: rank}) for rank in range(2)]
    report = put_together(records)
    assert report.first == 1
    assert report.verdict == "The weights of rank 1 part from rank 0's after 2 steps"
    assert report.to_dict()["rank_findings"][0]["kind"] == "replicas_part"


def test_equal_rows_fold_into_one() -> None:
    odd = record(17, "NaN at step 3", found_at=(3, 1))
    text = shown(put_together([odd, *(record(rank) for rank in range(64) if rank != 17)]))
    assert "63 ranks" in text
    assert text.count("nothing found") == 1
    assert "NaN at step 3" in text


def test_few_rows_stay_apart() -> None:
    text = shown(put_together([record(0), record(1)]))
    assert text.count(WELL) >= 2


def test_a_problem_of_many_is_said_once() -> None:
    records = [record(rank) for rank in range(3)]
    records = [replace(one, rank=replace(one.rank, report=replace(one.rank.report, problems=("no room",)))) for one in records]  # type: ignore[type-var]
    assert put_together(records).problems == ("ranks 0, 1 and 2: no room",)


def test_what_the_program_puts_right_itself_is_no_alarm() -> None:
    """As `torch.manual_seed(seed + rank)` before a model under DistributedDataParallel."""
    records = [record(rank, moments=(Moment("initial_weights", 0, rank), Moment("replicas_part", 0, 7))) for rank in range(2)]
    report = put_together(records)
    assert [(one.kind, one.is_harmless) for one in report.rank_findings] == [("initial_weights", True)]
    assert report.first is None
    assert report.verdict.startswith(f"All 2 ranks: {WELL} · the initial weights of rank 1 differ")
    page = catalog.instrument("nanhunt").page(report)
    assert page.status != "bad"
    assert not any(table.marked for table in page.blocks if isinstance(table, Table))


LONG = "the buffers of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 24 more drift after 6 steps"


def test_sentences_stand_together_while_they_fit() -> None:
    assert parted(["All ranks agree", "nothing found"]) == ("All ranks agree · nothing found", ())
    assert parted(["All ranks agree", LONG, "nothing found"]) == ("All ranks agree", (LONG, "nothing found"))


def test_nothing_follows_a_quoted_line() -> None:
    quoted = "Rank 1 of 2: NaN from log · train.py:3: `loss = x.log()`"
    assert parted([quoted, "rank 0 received it"]) == (quoted, ("rank 0 received it",))


@pytest.mark.parametrize(
    ("sentence", "headline"),
    [
        (f"Rank 1 of 2: {'x' * 80} · a.py:3", f"Rank 1: {'x' * 80}"),
        (f"Rank 1 of 2: {'x' * 60} · a.py:3 in {'f' * 20}: `y = 1`", f"Rank 1: {'x' * 60} · a.py:3: `y = 1`"),
        (f"Rank 0 raised RuntimeError: {'x' * 200} at a.py:3", "Rank 0 raised RuntimeError"),
        (f"2 ranks, nothing found on any; rank 0: {'x' * 80}", "2 ranks, nothing found on any"),
        (f"All 2 ranks: Gradients look healthy: {'x' * 80}", "All 2 ranks: Gradients look healthy"),
        (f"{LONG}, first {'x' * 80}", LONG),
    ],
)
def test_a_long_sentence_loses_what_the_rows_below_say(sentence: str, headline: str) -> None:
    assert parted([sentence]) == (headline, ())
