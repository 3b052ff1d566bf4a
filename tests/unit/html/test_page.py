"""A table is pure data that a page and a widget share."""

from __future__ import annotations

import pytest

from torchdebug_magics.html.page import Box, Boxes, Code, Facts, Fold, Note, Page, Table, cut_short_by


def table(rows: int, *marked: int) -> Table:
    return Table("t", ("name", "n"), tuple((f"r{index}", index) for index in range(rows)), {"n": "count"}, frozenset(marked))


def test_a_row_as_text_follows_the_formats_of_its_columns():
    assert Table("t", ("name", "n"), (("a", 20_000),), {"n": "count"}).text(0) == ("a", "20K")


def test_a_row_that_does_not_fit_its_columns_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        Table("t", ("name", "n"), (("a",),), {}).text(0)


@pytest.mark.parametrize(("marked", "order"), [((), [0, 1, 2, 3]), ((1,), [0, 1, 2, 3]), ((3,), [3, 0, 1, 2]), ((1, 3), [1, 3, 0, 2])])
def test_marked_rows_move_up_only_where_they_would_be_hidden(marked, order):
    assert table(4, *marked).shown(2, 2) == order[:2]


DOUBTS = [
    Facts((("why", "it is"), ("fix", "write `x`"))),
    Facts((("but", "only with twice as many steps"),)),
    Facts((("leak", "sample 1"),)),
    Note("it was not measured", "warn"),
    Boxes("b", (Box("a", "", "good"), Box("b", "", "bad"))),
    Fold("more", (Fold("and more", (Note("it failed", "bad"),)),)),
]


@pytest.mark.parametrize("block", DOUBTS, ids=lambda block: type(block).__name__)
@pytest.mark.parametrize(("asked", "shown"), [("good", "warn"), ("info", "warn"), ("warn", "warn"), ("bad", "bad"), ("busy", "busy")])
def test_a_page_on_which_something_is_wrong_is_never_green(block, asked, shown):
    assert Page("shapes", asked, "h", (Facts((("cost", "1"),)), block)).status == shown


@pytest.mark.parametrize("status", ["good", "info"])
def test_a_page_on_which_nothing_is_wrong_is_what_its_instrument_says(status):
    blocks = (Facts((("cost", "1"),)), Note("how it was made"), Code(((1, "x"),)), Fold("more", (table(2, 1),)))
    assert Page("shapes", status, "h", blocks).status == status


def test_a_watch_that_was_cut_short_says_so_where_nothing_worse_is_said():
    green, red = (Page("shapes", status, "h") for status in ("good", "bad"))
    assert cut_short_by(green, "ValueError").status == "warn"
    assert "ended with ValueError" in cut_short_by(green, "ValueError").blocks[0].text
    assert cut_short_by(red, "ValueError") is red
