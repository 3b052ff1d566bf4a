"""A table is pure data that a page and a widget share."""

from __future__ import annotations

import pytest

from torchdebug_magics.html.page import Table


def table(rows: int, *marked: int) -> Table:
    return Table("t", ("name", "n"), tuple((f"r{index}", index) for index in range(rows)), {"n": "count"}, frozenset(marked))


def test_a_row_as_text_follows_the_formats_of_its_columns():
    assert Table("t", ("name", "n"), (("a", 20_000),), {"n": "count"}).text(0) == ("a", "20K")


def test_a_row_that_does_not_fit_its_columns_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        Table("t", ("name", "n"), (("a",),), {}).text(0)


@pytest.mark.parametrize(
    ("marked", "order"),
    [((), [0, 1, 2, 3]), ((1,), [0, 1, 2, 3]), ((3,), [3, 0, 1, 2]), ((1, 3), [1, 3, 0, 2])],
)
def test_marked_rows_move_up_only_where_they_would_be_hidden(marked, order):
    assert table(4, *marked).order(2) == order
