"""Quantities over time: the picture, its words, its marks, and the scale that two of them share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from torchdebug_magics.html import pictures
from torchdebug_magics.html.page import Areas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
BLOCK = Areas("Held", (("weights", (MIB, MIB, MIB)), ("rest", (0, 3 * MIB, MIB))), "bytes", "events", (("forward", 0), ("backward", 2)), 1)
MARKED = replace(BLOCK, marks=(("a <b>", 1), ("end", 2)))


def drawn(block: Areas) -> Axes:
    axes = Figure().add_axes((0, 0, 1, 1))
    pictures._draw_areas(axes, block)
    return axes


def test_the_words_of_the_most():
    assert pictures.describe_areas(BLOCK) == "at most 4.0 MiB: weights 1.0 MiB, rest 3.0 MiB"


def test_marks_are_numbered_in_the_picture_and_named_beside_it():
    assert [text.get_text().strip() for text in drawn(MARKED).texts] == ["1", "2"]
    html = str(pictures.areas(MARKED))
    assert "┆ 1 a &lt;b&gt;" in html
    assert "┆ 2 end" in html
    assert pictures.describe_areas(MARKED).endswith("at the marks: 1 a <b> 4.0 MiB, 2 end 2.0 MiB")


def test_a_shared_scale_is_the_one_that_is_drawn_and_said():
    low, high = drawn(BLOCK).get_ylim(), drawn(replace(BLOCK, top=8 * MIB)).get_ylim()
    assert high[1] == 2 * low[1]
    assert ">8.0 MiB<" in str(pictures.areas(replace(BLOCK, top=8 * MIB)))


def test_it_is_drawn_where_nothing_is_known_of_what_went_on():
    assert "<img " in str(pictures.areas(replace(BLOCK, stretches=())))


def test_a_kind_has_one_colour_whatever_stands_beside_it():
    one = Areas("a", (("parameter", (1, 2)), ("activation", (1, 2))), "bytes", "x", (("forward", 0), ("loss", 1)))
    other = Areas("b", (("activation", (1, 2)), ("gradient", (1, 1)), ("parameter", (2, 1))), "bytes", "x", (("loss", 0),))
    colours = [dict(zip((name for name, _ in block.series), pictures._area_colours(block), strict=True)) for block in (one, other)]
    assert colours[0].items() <= colours[1].items()
    assert len(set(colours[1].values())) == 3
    assert pictures._strip_colours(one)["loss"] == pictures._strip_colours(other)["loss"]


def test_what_lies_below_the_scale_is_not_drawn():
    block = replace(BLOCK, series=(("held before the cell", (100, 100, 100)), ("rest", (0, 3, 1))), bottom=99.0)
    axes = drawn(block)
    assert axes.get_ylim()[0] > 98
    assert min(path.vertices[:, 1].min() for collection in axes.collections for path in collection.get_paths()) == 99
    assert ">99 B<" in str(pictures.areas(block))
