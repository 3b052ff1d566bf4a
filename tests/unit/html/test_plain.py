"""A page as text: the verdict first, aligned, in at most 100 columns."""

from __future__ import annotations

import pytest

from torchdebug_magics.html import plain
from torchdebug_magics.html.page import Bars, Box, Boxes, Chart, Code, Facts, Fold, Measure, Note, Page, Place, Table


def lines(*blocks: object, verdict: str = "it broke") -> list[str]:
    return plain.render(Page("nanhunt", "bad", verdict, blocks)).splitlines()


def test_the_verdict_comes_first_with_its_status_in_words():
    assert lines()[0] == "[✖ problem] it broke"


def test_prose_is_wrapped_at_100_columns_and_no_word_is_cut():
    path = "transformer.h.11.attention.self." * 2 + "query"
    text = f"{'many words ' * 30}{path}"
    shown = lines(Facts((("fix", text),)), Note(text, "warn"), Fold("more", (Note(text),)), verdict=text)
    assert max(map(len, shown)) <= 100
    assert sum(path in line for line in shown) == 4


def test_facts_are_aligned():
    assert lines(Facts((("fix", "add"), ("surfaced in", "loss"))))[2:] == ["fix          add", "surfaced in  loss"]


def test_facts_may_have_a_title():
    assert lines(Facts((("2", "log"),), "Other findings"))[2:] == ["Other findings", "2  log"]


def test_the_marked_line_has_an_arrow():
    assert lines(Code(((9, "a"), (10, "b")), 10, "In[1] line 10"))[2:] == ["In[1] line 10", "    9 | a", "-> 10 | b"]


def test_a_table_is_aligned_numbers_to_the_right():
    table = Table("all", ("name", "n"), (("a", 1), ("long", 20_000)), {"n": "count"}, frozenset({1}))
    assert lines(table)[2:] == ["all", "    name    n", "    a       1", "->  long  20K"]


def test_a_wide_table_goes_on_below_under_its_first_column_again():
    columns = ("name", *(f"a_rather_long_heading_{number}" for number in range(8)))
    shown = lines(Table("all", columns, (("row", *range(8)),), dict.fromkeys(columns[1:], "count")))
    assert max(map(len, shown)) <= 104
    assert sum("row" in line for line in shown) == 3


def test_long_tables_are_cut_and_say_so():
    table = Table("all", ("name",), tuple((f"r{row}",) for row in range(30)), {}, frozenset({29}))
    shown = lines(table)
    assert shown[4] == "->  r29"
    assert shown[-1] == "   18 more, see the report"


def test_an_empty_table_and_no_facts_are_nothing():
    assert lines(Table("all", ("name",), (), {}), Facts(())) == ["[✖ problem] it broke"]


def test_a_chart_is_words_and_bars():
    assert lines(Chart("loss", (1.0, 10.0), "step", "loss"))[2:] == ["loss: 2 values; from 1.0 to 10.0, largest 10.0", "  ▁█"]


@pytest.mark.parametrize("evil", ["a\x1b[2Jb", "a\nb\rc"])
def test_no_escape_sequence_and_no_line_break_of_the_users_gets_through(evil):
    shown = plain.render(
        Page(
            "nanhunt",
            "bad",
            evil,
            (Facts(((evil, evil),)), Code(((1, evil),), 1, evil), Table(evil, (evil,), ((evil,),), {}), Note(evil), Fold(evil, ())),
        )
    )
    assert not {"\x1b", "\r"} & set(shown)
    assert "\nb" not in shown


def test_a_tree_is_indented_and_cut_by_depth():
    rows, places = [("net",)], [Place(0, "net")]
    for one in range(4):
        rows += [(f"p{one}",), *((f"p{one}.q{two}",) for two in range(30))]
        places += [Place(1, f"p{one}"), *(Place(2, f"q{two}") for two in range(30))]
    shown = lines(Table("all", ("name",), rows, {}, tree=tuple(places)))
    assert shown[4:] == ["    net", *(f"      p{at}  + 30 inside" for at in range(4)), "   120 more, see the report"]


def test_boxes_lead_from_one_to_the_next_or_say_what_stops_the_way():
    boxes = (Box("a", "here", "good"), Box("long", "there", "bad", ("a wall",)), Box("c", "lost", "bad"), Box("d", "end", "info"))
    shown = lines(Boxes("the way", boxes))
    assert shown[2:] == ["the way", "  ✔ a     here", "  ↓", "  ✖ long  there", "  ✂ a wall", "  ✖ c     lost", "  ● d     end"]


def test_bars_are_blocks_with_their_numbers():
    shown = lines(Bars("where", ("a", "long"), (Measure("params", (30, 10), "count"), Measure("bytes", (0, 1), "bytes"))))
    assert shown[2:] == ["where", "", "params", f"  a     {'█' * 16}  30 (75%)", f"  long  {'█' * 5}{' ' * 11}  10 (25%)", "", "bytes",
                         f"  a     {' ' * 16}  -", f"  long  {'█' * 16}  1 B (100%)"]  # fmt: skip
