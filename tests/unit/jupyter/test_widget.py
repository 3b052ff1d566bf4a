from __future__ import annotations

import pytest

from torchdebug_magics.html.markup import tree
from torchdebug_magics.html.page import Place, Table
from torchdebug_magics.jupyter.widget import TableView, arranged

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


TREE = Table(
    "parts",
    ("name", "size"),
    (("net", 9), ("a", 5), ("a.x", 1), ("a.y", 4), ("b", 4), ("b.x", 4)),
    {"size": "count"},
    frozenset({3}),
    tree=(Place(0, "net"), Place(1, "a"), Place(2, "x"), Place(2, "y"), Place(1, "b"), Place(2, "x")),
)


@pytest.mark.parametrize(
    ("needle", "kept"), [("a.y", ["net", "a", "a.y"]), (".x", ["net", "a", "a.x", "b", "b.x"]), ("net", ["net"]), ("none", [])]
)
def test_what_is_found_in_a_tree_keeps_what_it_stands_in(needle: str, kept: list[str]) -> None:
    shown = arranged(TREE, needle=needle)
    assert [row[0] for row in shown.rows] == kept
    assert len(shown.tree) == len(kept)


def test_a_tree_that_is_sorted_is_a_list_of_full_names() -> None:
    shown = arranged(TREE, column=1)
    assert [row[0] for row in shown.rows] == ["net", "a", "a.y", "b", "b.x", "a.x"]
    assert {place.depth for place in shown.tree} == {0}
    assert shown.tree[2].label == "a.y"
    assert shown.marked == {2}


def test_a_tree_is_written_as_details_inside_details() -> None:
    html = tree(TREE, opened={0})
    assert html.count("<details") == html.count("</details>") == 3
    assert html.count("<details open") == 1
    assert (
        html.index(">net<")
        < html.index(">  a<")
        < html.index(">    x<")
        < html.index(">    y \N{HEAVY MULTIPLICATION X}<")
        < html.index(">  b<")
    )


def test_the_names_of_a_user_are_escaped_in_a_tree() -> None:
    evil = "<script>"
    assert evil not in tree(Table(evil, (evil,), ((evil,),), {}, tree=(Place(0, evil),)))


def test_a_tree_is_expanded_collapsed_and_searched_in_full() -> None:
    folded = Table("parts", ("name",), (("p0 … 2",),), {}, tree=(Place(0, "p0 … 2"),), whole=TREE)
    view = TableView(folded)
    view.close.click()
    assert "<details open" not in view.html.value
    view.open.click()
    assert view.html.value.count("<details open") == 3
    view.filter.value = "b.x"
    assert view.html.value.count("<details open") == 2
    view.filter.value = "nothing"
    assert "no row matches" in view.html.value
