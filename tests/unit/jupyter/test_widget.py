from __future__ import annotations

import pytest

from torchdebug_magics.html.page import Table
from torchdebug_magics.jupyter.widget import arranged

TABLE = Table(
    "sizes",
    ("name", "size"),
    (("b", 2.0), ("a", None), ("c", float("nan")), ("d", 10.0), ("e", float("inf"))),
    {"size": "number"},
    frozenset({3}),
)


def names(table: Table) -> str:
    return "".join(str(row[0]) for row in table.rows)


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ({}, "bacde"),
        ({"column": 0, "descending": False}, "abcde"),
        ({"column": 1}, "edbac"),
        ({"column": 1, "descending": False}, "bdeac"),
        ({"needle": "INF"}, "e"),
        ({"needle": "none of them"}, ""),
    ],
)
def test_rows_are_filtered_and_sorted(how: dict[str, object], order: str) -> None:
    assert names(arranged(TABLE, **how)) == order


def test_marks_go_along() -> None:
    shown = arranged(TABLE, column=1)
    assert [shown.rows[at][0] for at in shown.marked] == ["d"]
    assert not arranged(TABLE, needle="inf").marked
