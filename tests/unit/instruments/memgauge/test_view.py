"""What a gauge shows, from reports built by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Chart, Facts, Fold
from torchdebug_magics.instruments.memgauge.report import DevicePeak, GaugeReport, LiveGauges
from torchdebug_magics.instruments.memgauge.view import live_page, page, page_after_cell
from torchdebug_magics.machine.guard_interrupt import Interrupt
from torchdebug_magics.report import Gauge

MIB = 2**20
GIB = 2**30
INTERRUPT = Interrupt(9 * GIB, 10 * GIB, "container limit", 0.9)
REPORT = GaugeReport(
    rss_start_bytes=GIB,
    rss_end_bytes=2 * GIB,
    rss_peak_bytes=3 * GIB,
    rss_peak_is_exact=True,
    limit_bytes=10 * GIB,
    limit="container limit",
    limit_peak_bytes=3 * GIB,
    devices=(),
    interrupts=(),
    gauges=(Gauge("this process (RSS)", 2 * GIB, 10 * GIB),),
)


def text(report: GaugeReport) -> str:
    return plain.render(page(report))


def test_growth_and_what_was_left_come_first():
    assert text(REPORT).startswith("[● note] Process grew by 1.0 GiB, peak 3.0 GiB; 7.0 GiB of 10.0 GiB left\n")
    assert "counted by the system" in text(REPORT)
    assert markup.render(page(REPORT)).count("<meter ") == 2
    assert REPORT.verdict == "Process grew by 1.0 GiB, peak 3.0 GiB; 7.0 GiB of 10.0 GiB left · limit: 10.0 GiB (container limit)"


@pytest.mark.parametrize(
    ("end_bytes", "said", "badge"),
    [(GIB, "did not grow", "fine"), (GIB + 40 * MIB, "grew by 40.0 MiB", "fine"), (GIB + 210 * MIB, "grew by 210.0 MiB", "note"),
     (GIB // 2, "shrank by 512.0 MiB", "fine")],
)  # fmt: skip
def test_growth_is_never_just_fine_however_large_the_machine_is(end_bytes: int, said: str, badge: str):
    report = replace(REPORT, rss_end_bytes=end_bytes, limit_bytes=24 * GIB)
    assert f"{badge}] Process {said}" in text(report)


def test_the_course_is_the_one_picture_and_all_gauges_fold():
    report = replace(REPORT, course_bytes=(GIB, 3 * GIB, 2 * GIB), duration_s=12.0)
    kinds = [type(block) for block in page(report).blocks]
    assert kinds == [Facts, Chart, Fold]
    assert "12 s" in markup.render(page(report))
    assert "largest 3,072" in text(report) or "3072" in text(report)


def test_what_others_use_is_told_apart():
    shared = replace(REPORT, limit_peak_bytes=8 * GIB)
    assert "; 2.0 GiB of 10.0 GiB left · limit: 10.0 GiB (container limit); other processes use 5.0 GiB of it" in shared.verdict
    assert "other processes use 5.0 GiB of it" in text(shared)
    assert "other processes" not in text(REPORT)


def test_a_narrow_escape_is_a_caution():
    assert text(replace(REPORT, rss_peak_bytes=10 * GIB - 5, limit_peak_bytes=10 * GIB - 5)).startswith("[▲ caution]")


def test_a_peak_that_was_only_seen_is_at_least_that():
    assert "peak at least 3.0 GiB" in text(replace(REPORT, rss_peak_is_exact=False))
    assert "no counter" in text(replace(REPORT, rss_peak_is_exact=False))


def test_without_a_limit():
    assert "no memory limit is known" in text(replace(REPORT, limit_bytes=None, limit="", limit_peak_bytes=None))


def test_devices_are_in_the_verdict():
    used, unused = DevicePeak("GPU 0 · A", 5 * GIB, 16 * GIB, is_exact=True), DevicePeak("GPU 1 · A", 0, 16 * GIB, is_exact=True)
    report = replace(REPORT, devices=(used, unused))
    assert report.verdict.endswith("limit: 10.0 GiB (container limit); 7.0 GiB left at the peak")
    assert report.title == "GPU 0 peak 5.0 GiB of 16.0 GiB; process grew by 1.0 GiB"
    assert "GPU 0 · A, allocated" in text(report)
    assert "GPU 1" not in text(report)


def test_an_interrupt_says_at_what_and_which_limit():
    report = replace(REPORT, interrupts=(INTERRUPT,))
    assert report.verdict.startswith(
        "Stopped by guard at 9.0 GiB of 10.0 GiB (container limit) · guard: interrupted the cell, as `--guard 90%` asks"
    )
    assert text(report).startswith("[▲ caution] Stopped by guard at 9.0 GiB of 10.0 GiB (container limit)\n")
    assert report.to_dict()["interrupts"][0]["used_bytes"] == 9 * GIB


def test_after_the_guard_the_largest_variables_are_named():
    report = replace(REPORT, interrupts=(INTERRUPT,), holders=(("hoard", 6 * GIB), ("net", MIB)))
    assert "held by  `hoard` 6.0 GiB, `net` 1.0 MiB" in text(report)


def test_after_a_cell_only_a_new_interrupt_is_worth_a_word():
    quiet, once, twice = (LiveGauges(REPORT.gauges, GIB, (INTERRUPT,) * count) for count in range(3))
    assert page_after_cell(None, quiet) is None
    assert page_after_cell(once, once) is None
    for before, now in ((None, once), (quiet, once), (once, twice)):
        said = page_after_cell(before, now)
        assert said is not None
        assert said.headline == str(INTERRUPT)


def test_live_gauges():
    shown = plain.render(live_page(LiveGauges(REPORT.gauges, 3 * GIB, ())))
    assert "Peak so far 3.0 GiB" in shown
    assert "2.0 GiB of 10.0 GiB" in shown
