"""A heatmap: an image beside the names of its rows, coloured text while it moves, and words for who cannot see it."""

from __future__ import annotations

import math

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html import pictures as module
from torchdebug_magics.html.page import Heatmap, Page
from torchdebug_magics.html.pictures import describe_heatmap, heatmap

EVIL = "<script>alert('&\"')</script>"
ROWS = (("a", (1.0, 10.0, 100.0)), ("b", (None, 0.0, math.inf)))


@pytest.mark.parametrize("is_quick", [False, True])
def test_names_are_text_and_what_lies_outside_the_scale_has_a_word(is_quick: bool) -> None:
    written = heatmap(Heatmap("Norms", ROWS, "step", is_quick=is_quick))
    assert written.count("<tr") == 3
    assert all(text in written for text in (">a</td>", ">b</td>", "step 0", "step 2", "zero", "NaN or inf", "1.0 ", " 100.0"))
    assert ("<img" in written, "█" in written) == (not is_quick, is_quick)


@pytest.mark.parametrize("is_quick", [False, True])
def test_every_string_is_escaped(is_quick: bool) -> None:
    written = heatmap(Heatmap(EVIL, ((EVIL, (1.0, 2.0)),), EVIL, is_quick=is_quick))
    assert "<script" not in written


@pytest.mark.parametrize("values", [(), (None,), (math.nan, math.inf), (0.0, 0.0), (1.0,), (-1.0, 1.0), (1e-45, 1e38)])
@pytest.mark.parametrize("log", [True, False])
def test_whatever_the_values_it_is_drawn_and_described(values: tuple[float | None, ...], log: bool) -> None:
    block = Heatmap("t", (("row", values),), "step", log=log)
    assert isinstance(heatmap(block), str)
    assert describe_heatmap(block).startswith("t: ")
    assert plain.render(Page("i", "info", "v", (block,)))


def test_many_rows_are_chosen_evenly_and_it_says_so() -> None:
    rows = tuple((f"row {number}", (1.0, 2.0)) for number in range(1000))
    written = heatmap(Heatmap("t", rows, "step"))
    assert "t (48 of 1,000 rows, evenly chosen)" in written
    assert ">row 0</td>" in written
    assert ">row 999</td>" in written


def test_a_value_may_stand_for_several_steps() -> None:
    assert "step 23" in heatmap(Heatmap("t", (("a", (1.0, 2.0, 3.0)),), "step", 8))
    assert describe_heatmap(Heatmap("t", (("a", (1.0, 2.0, 3.0)),), "step", 8)) == "t: 1 row over 24 steps, from 1.0 to 3.0, largest in a"


def test_where_it_cannot_be_drawn_the_words_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "image", lambda *_, **__: 1 / 0)
    assert "largest in a" in markup.render(Page("i", "info", "v", (Heatmap("t", ROWS, "step"),)))
