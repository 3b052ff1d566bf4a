"""Quantities over time: the picture, its words, its marks, and the scale that two of them share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from torchdebug_magics.html import areas
from torchdebug_magics.html.page import Areas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
BLOCK = Areas("Held", (("weights", (MIB, MIB, MIB)), ("rest", (0, 3 * MIB, MIB))), "bytes", "events", (("forward", 0), ("backward", 2)), 1)
MARKED = replace(BLOCK, marks=(("a <b>", 1), ("end", 2)))


def drawn(block: Areas) -> Axes:
    axes = Figure().add_axes((0, 0, 1, 1))
    areas._draw(axes, block)
    return axes


def test_the_words_of_the_most():
    assert areas.describe(BLOCK) == "at most 4.0 MiB: weights 1.0 MiB, rest 3.0 MiB"


def test_marks_are_numbered_in_the_picture_and_named_beside_it():
    assert [text.get_text().strip() for text in drawn(MARKED).texts] == ["1", "2"]
    html = str(areas.areas(MARKED))
    assert "┆ 1 a &lt;b&gt;" in html
    assert "┆ 2 end" in html
    assert areas.describe(MARKED).endswith("at the marks: 1 a <b> 4.0 MiB, 2 end 2.0 MiB")


def test_a_shared_scale_is_the_one_that_is_drawn_and_said():
    low, high = drawn(BLOCK).get_ylim(), drawn(replace(BLOCK, top=8 * MIB)).get_ylim()
    assert high[1] == 2 * low[1]
    assert ">8.0 MiB<" in str(areas.areas(replace(BLOCK, top=8 * MIB)))


def test_it_is_drawn_where_nothing_is_known_of_what_went_on():
    assert "<img " in str(areas.areas(replace(BLOCK, stretches=())))
