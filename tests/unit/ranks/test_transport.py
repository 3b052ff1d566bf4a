"""A rank without a finding is small when it travels; one with a finding is whole."""

from __future__ import annotations

import gc
import pickle
import random
import zlib
from dataclasses import replace

import pytest

from tests.unit.ranks.built import FOUND, LINE, WELL, record
from torchdebug_magics import catalog
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.nanhunt.report import LayerRow, NanReport
from torchdebug_magics.ranks.compared import HEALTHY_BYTES, Moment, RankRecord, is_cut, packed, unpacked
from torchdebug_magics.ranks.merging import held_details, merged


def with_report(one: RankRecord, report: NanReport) -> RankRecord:
    return replace(one, rank=replace(one.rank, report=report))


def large(**fields: object) -> NanReport:
    numbers = random.Random(0)
    row = LayerRow(
        module="layers.0", type="Linear", call=1, shape=(8, 16, 16, 3), dtype="float32", nan_count=0, posinf_count=0, neginf_count=0,
        min=0.1, max=0.2, mean_abs=0.1, fp16_share=None, grad_nan_count=None, grad_inf_count=None, grad_max_abs=None, grad_mean_abs=None,
    )  # fmt: skip
    layers = tuple(replace(row, module=f"layers.{number}.attention", max=numbers.random()) for number in range(300))
    history = tuple(numbers.random() for _ in range(2000))
    return NanReport(sentence=WELL, history=history, losses=history[::-1], layers=layers, steps_count=2000, problems=("seen",))


def of(one: RankRecord) -> NanReport:
    report = one.rank.report
    assert isinstance(report, NanReport)
    return report


def test_a_healthy_rank_takes_at_most_four_kilobytes() -> None:
    data = packed(with_report(record(3), large()))
    assert len(data) <= len(zlib.decompress(data)) <= HEALTHY_BYTES
    (back,) = unpacked([data])
    assert back.rank.rank == 3
    report = of(back)
    assert (report.sentence, report.steps_count) == (WELL, 2000)
    assert report.problems == ("seen", "shortened on the way to rank 0: history, losses, layers")
    assert is_cut(report)
    assert len(report.history) <= 64


def test_shapes_stay_whole() -> None:
    report = of(unpacked([packed(with_report(record(3), replace(large(), layers=large().layers[:8])))])[0])
    assert all(row.shape == (8, 16, 16, 3) for row in report.layers)


def test_a_small_report_travels_as_it_is() -> None:
    one = record(1, moments=(Moment("same_batch", 0, 7, LINE),))
    (back,) = unpacked([packed(one)])
    assert back == one
    assert not is_cut(of(back))


@pytest.mark.parametrize("one", [record(1, found_at=(3, 2)), record(1, state="raised", exit_code=1)], ids=["with a finding", "raised"])
def test_what_went_wrong_travels_whole(one: RankRecord) -> None:
    one = with_report(one, large())
    (back,) = unpacked([packed(one)])
    assert back == one


def test_a_finding_is_shortened_only_where_there_is_no_room() -> None:
    one = with_report(record(1, found_at=(3, 2)), large())
    assert len(zlib.decompress(packed(one, 10_000))) <= 10_000
    assert unpacked([packed(one, 10_000_000)]) == [one]


def test_details_stay_at_home() -> None:
    one = record(1, details={("replicas_part", 1): {f"layer{number}.weight": number for number in range(10_000)}})
    assert len(packed(one)) < 1000
    assert unpacked([packed(one)])[0].compared.details == {}


def test_a_shortened_report_shows_its_verdict_and_what_is_missing() -> None:
    (back,) = unpacked([packed(with_report(record(3), large()))])
    text = plain.render(catalog.instrument("nanhunt").page(of(back)))
    assert WELL in text
    assert "shortened on the way to rank 0: history, losses, layers" in text


def test_the_merged_report_does_not_complain_of_it() -> None:
    records = [with_report(record(0), large()), *unpacked([packed(with_report(record(1), large()))])]
    report = merged("nanhunt", records, held_details(records))
    assert report.problems == ("ranks 0 and 1: seen",)
    assert report.history == large().history
    assert report.verdict == f"All 2 ranks: {WELL}"


def test_the_collector_is_as_it_was() -> None:
    gc.disable()
    try:
        unpacked([packed(record(0))])
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(zlib.error):
        unpacked([b"no record"])
    assert gc.isenabled()


def test_a_record_is_plain_data() -> None:
    assert pickle.loads(pickle.dumps(record(0))) == record(0)


def test_a_shortened_report_keeps_its_first_finding() -> None:
    one = with_report(record(1, found_at=(3, 2)), replace(large(), findings=(FOUND,) * 400))
    (back,) = unpacked([packed(one, 2_500)])
    assert is_cut(of(back))
    assert (of(back).found, of(back).finding) == (True, FOUND)
