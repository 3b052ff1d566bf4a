"""Marks that are set in a traced cell: where they stand, and what torch held then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import torchdebug_magics
from torchdebug_magics.html import markup, plain
from torchdebug_magics.instruments.memtrace.view import page
from torchdebug_magics.memory.gauges import ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.doors import Observe

MIB = 2**20
BODY = """\
import torch, torchdebug_magics
kept = torch.zeros(1 << 18)
torchdebug_magics.memmark("one kept")
more = torch.zeros(1 << 19)
torchdebug_magics.memmark("two <kept>")
del more
torchdebug_magics.memmark("freed")
end = torch.zeros(1 << 18)
"""


@pytest.fixture(autouse=True)
def no_marks() -> Iterator[None]:
    ledger().clear()
    yield
    ledger().clear()


def test_marks_say_what_torch_held_and_where_they_stand(observe: Observe):
    torchdebug_magics.memmark("before the cell")
    report = observe("memtrace", BODY).report
    assert [mark.label for mark in report.marks] == ["one kept", "two <kept>", "freed"]
    first, second, third = (mark.torch_bytes - report.start_bytes for mark in report.marks)
    assert (first, second, third) == (MIB, 3 * MIB, MIB)
    heights = [sum(levels) for levels in zip(*report.timeline.categories.values(), strict=True)]
    assert [heights[point] - report.start_bytes for point in report.timeline.marks] == [MIB, 3 * MIB, MIB]
    assert report.problems == ()


def test_marks_are_drawn_named_and_listed(observe: Observe):
    report = observe("memtrace", BODY).report
    html, text = markup.render(page(report)), " ".join(plain.render(page(report)).split())
    assert "┆ 2 two &lt;kept&gt;" in html
    assert ">one kept</th>" in html
    assert "at the marks: 1 one kept" in text
    assert "+2.0 MiB" in text
    assert "-2.0 MiB" in text


def test_a_mark_in_the_forward_pass_knows_it(observe: Observe):
    body = (
        "import torch, torchdebug_magics\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        torchdebug_magics.memmark('inside')\n"
        "        return super().forward(x)\n"
        "net = Net(2, 2)\n"
        "net(torch.zeros(1, 2))\n"
    )
    assert [mark.phase for mark in observe("memtrace", body).report.marks] == ["forward"]


def test_marks_after_the_cell_are_not_its_own_and_clearing_loses_none():
    with torchdebug_magics.memtrace() as session:
        torchdebug_magics.memmark("inside")
        torchdebug_magics.memmark(clear=True)
        torchdebug_magics.memmark("and again")
    torchdebug_magics.memmark("after")
    assert [mark.label for mark in session.report.marks] == ["inside", "and again"]
    assert '"label": "inside"' in session.report.to_json()


def test_of_two_sessions_each_has_the_marks_of_its_time():
    with torchdebug_magics.memtrace() as outer:
        torchdebug_magics.memmark("1")
        with torchdebug_magics.memtrace() as inner:
            torchdebug_magics.memmark("2")
    assert [[mark.label for mark in one.report.marks] for one in (outer, inner)] == [["1", "2"], ["2"]]
