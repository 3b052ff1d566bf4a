"""All marks as a table and a picture, from marks made by hand."""

from __future__ import annotations

from torchdebug_magics.html import markup, plain
from torchdebug_magics.instruments.memmark.report import MarkReport, MarksReport
from torchdebug_magics.instruments.memmark.view import page
from torchdebug_magics.report import Mark

GIB = 2**30


def on_cpu(label: str, rss_bytes: int, rank: int | None = None) -> Mark:
    return Mark(label=label, rank=rank, rss_bytes=rss_bytes, limit="container limit", limit_used_bytes=rss_bytes, limit_bytes=8 * GIB)


def on_gpu(label: str, allocated_bytes: int, *, is_new: bool = True) -> Mark:
    return Mark(
        label=label,
        rank=0,
        rss_bytes=GIB,
        limit="",
        limit_used_bytes=None,
        limit_bytes=None,
        device="GPU 0 · A",
        allocated_bytes=allocated_bytes,
        max_allocated_bytes=5 * GIB,
        reserved_bytes=4 * GIB,
        max_reserved_bytes=6 * GIB,
        max_is_new=is_new,
        driver_bytes=7 * GIB,
        unaccounted_bytes=GIB,
    )


def shown(*marks: Mark) -> str:
    return plain.render(page(MarksReport(marks=marks)))


def test_where_it_grew_most_comes_first():
    text = shown(on_cpu("a", GIB), on_cpu("b", 4 * GIB), on_cpu("c", 5 * GIB))
    assert text.startswith("[● note] 3 marks; RSS grew most, by 3.0 GiB, between `a` and `b`")
    assert "+3.0 GiB" in text
    assert "MA" not in text
    assert "container limit used" in text


def test_limits_of_several_owners_have_no_owner_in_the_heading():
    other = Mark(label="c", rank=None, rss_bytes=1, limit="the whole machine", limit_used_bytes=1, limit_bytes=2)
    assert "  limit used  " in shown(on_cpu("a", GIB), other)


def test_on_a_gpu_it_is_what_torch_has_allocated():
    text = shown(on_gpu("fwd", 2 * GIB), on_gpu("bwd", 3 * GIB, is_new=False))
    assert "MA grew most, by 1.0 GiB, between `[0] fwd` and `[0] bwd`" in text
    assert text.count("older") == 1
    assert "limit" not in text


def test_one_mark_none_and_no_growth():
    assert "1 mark: a" in shown(on_cpu("a", 1))
    assert "No marks so far" in shown()
    assert "RSS did not grow" in shown(on_cpu("a", 2), on_cpu("b", 1))


def test_a_picture_of_each_number_that_is_known():
    html = markup.render(page(MarksReport(marks=(on_gpu("a", 1), on_gpu("b", 2)))))
    assert html.count("<img ") == 3
    assert "MA: allocated by torch, in MiB" in html
    assert markup.render(page(MarksReport(marks=(on_cpu("a", 1),)))).count("<img ") == 0


def test_a_long_row_continues_below_the_headline():
    report = MarkReport(mark=on_gpu("fwd", 2 * GIB), before=None)
    shown = page(report)
    assert shown.headline == "[0] fwd: MA 2.0 GiB | Max_MA 5.0 GiB | CA 4.0 GiB | Max_CA 6.0 GiB | NV 7.0 GiB"
    assert f"{shown.headline} | {report.rest}" == report.verdict
    assert "also  unaccounted 1.0 GiB | RSS 1.0 GiB" in plain.render(shown)


def test_a_mark_alone_is_its_row():
    report = MarkReport(mark=on_cpu("a <b>", 2 * GIB), before=on_cpu("x", GIB))
    assert plain.render(page(report)) == "[● note] a <b>: RSS 2.0 GiB (+1.0 GiB) | container limit 2.0 GiB of 8.0 GiB (+1.0 GiB)"
    assert "a &lt;b&gt;" in markup.render(page(report))
