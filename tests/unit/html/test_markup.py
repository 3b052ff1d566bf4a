"""A page as HTML: every block, and nothing that an untrusted notebook would drop."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.page import Bars, Box, Boxes, Chart, Code, Facts, Fold, Measure, Note, Page, Place, Table, Verbatim

EVIL = "<script>alert('x')</script>\" onload=\"y"
VOID = {"br", "img"}
DROPPED = ("<style", "<script", "<svg", "var(--", "aria-", "role=", "onclick")


class Checker(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def elements(html: str) -> list[str]:
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    return checker.seen


def page(*blocks: object, status: str = "bad", verdict: str = "it broke") -> Page:
    return Page("nanhunt", status, verdict, blocks)


def table(rows: int, *, marked: frozenset[int] = frozenset(), name: str = "layer", columns: int = 16) -> Table:
    heads = ("module", *(f"c{number}" for number in range(columns)))
    return Table(
        "all layers", heads, tuple((f"{name}.{row}", *[1.5] * columns) for row in range(rows)), dict.fromkeys(heads[1:], "number"), marked
    )


EVERYTHING = page(
    Facts((("fix", "do `this`"), (EVIL, EVIL))),
    Code(((1, "x = 1"), (22, EVIL)), 22, EVIL),
    Table(EVIL, ("module", EVIL), ((EVIL, EVIL),), {}, frozenset({0})),
    Chart(EVIL, (1.0, float("nan"), 3.0), EVIL, EVIL),
    Bars(EVIL, (EVIL,), (Measure(EVIL, (1.0,), "count"),)),
    Boxes(EVIL, (Box(EVIL, EVIL, "bad", (EVIL,)), Box("loss", EVIL, "info"))),
    Table(EVIL, ("module",), ((EVIL,),), {}, tree=(Place(0, EVIL),)),
    Note(EVIL, "warn"),
    Fold(EVIL, (Note("inside"),)),
    verdict=EVIL,
)


def test_every_block_is_well_formed_and_escaped():
    html = markup.render(EVERYTHING)
    seen = elements(html)
    assert "script" not in seen
    assert {"table", "caption", "th", "details", "summary", "pre", "img", "code"} <= set(seen)


def test_nothing_depends_on_what_an_untrusted_notebook_drops():
    html = markup.render(page(table(3), Chart("c", (1.0, 2.0), "x", "y"), verdict="v"))
    assert not [word for word in DROPPED if word in html]


@pytest.mark.parametrize(("status", "words"), [("good", "✔ fine"), ("bad", "✖ problem"), ("warn", "▲ caution"), ("info", "● note")])
def test_the_status_is_a_symbol_and_a_word_before_the_headline(status, words):
    html = markup.render(page(status=status))
    assert html.index(words) < html.index("it broke")


def test_headings_have_a_scope_and_tables_a_caption():
    html = markup.render(page(table(2)))
    assert html.count('scope="row"') == 2
    assert html.count('scope="col"') == 17
    assert "all layers</caption>" in html


def test_an_empty_table_is_not_shown():
    assert "<table" not in markup.render(page(table(0)))


def test_fifty_rows_are_open_and_the_rest_is_folded():
    html = markup.render(page(table(60, columns=2)))
    opened, folded = html.split("<details", 1)
    assert opened.count('scope="row"') == 50
    assert folded.count('scope="row"') == 10
    assert "10 further rows" in folded
    assert "see the report" not in html


@pytest.mark.parametrize("name", ["layer", "transformer.h.attention.projection" * 5, "é" * 200])
def test_a_thousand_rows_stay_below_100_kb(name):
    # Given a table of 1000 rows, a chart and a second table
    html = markup.render(page(Chart("c", tuple(range(1, 2000)), "x", "y"), table(1000, name=name), table(1000, name=name)))
    # Then the output is small, and says how many rows it lacks
    assert len(html.encode()) < 100_000
    shown = html.count('scope="row"')
    left_out = sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) more, see the report", html))
    assert shown + left_out == 2000


def test_a_marked_row_has_a_symbol_and_comes_first_where_it_would_be_folded():
    html = markup.render(page(table(100, marked=frozenset({70}))))
    assert html.index("layer.<wbr>70 ✖<") < html.index("layer.<wbr>0<")


def test_code_in_captions_and_in_prose_is_code():
    html = markup.render(
        page(Table("the gradient of `w`", ("n", "said"), (("1", "put `x`"),), {"said": "prose"}), Facts((("a", "b"),), "of `w`"))
    )
    assert html.count(">w</code>") == 2
    assert ">x</code>" in html


def test_wide_tables_scroll_and_names_are_whole():
    name = "a_very_long_module_name" * 8
    html = markup.render(page(table(1, name=name)))
    assert "overflow:auto" in html
    assert f"{name}.<wbr>0</th>" in html


def test_the_marked_line_has_an_arrow():
    html = markup.render(page(Code(((9, "a"), (10, "b < c")), 10)))
    assert "→ 10 │ b &lt; c</span>" in html
    assert "   9 │ a\n" in html


def test_without_matplotlib_a_chart_is_bars_of_text(monkeypatch):
    # Given an environment in which matplotlib cannot be imported
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.style", None)
    # When a chart is shown
    html = markup.render(page(Chart("loss", (1.0, 10.0), "step", "loss")))
    # Then it is still told
    assert "<img" not in html
    assert "loss: ▁█ loss: 2 values; from 1.0 to 10.0, largest 10.0" in html


def branching(outer: int, inner: int, *, marked: frozenset[int] = frozenset()) -> Table:
    """A root with `outer` parts, each with `inner` parts."""
    rows, places = [("net", 0)], [Place(0, "net")]
    for one in range(outer):
        rows += [(f"p{one}", 1), *((f"p{one}.q{two}", two) for two in range(inner))]
        places += [Place(1, f"p{one}"), *(Place(2, f"q{two}") for two in range(inner))]
    return Table("tree", ("module", "n"), rows, {"n": "count"}, marked, tree=tuple(places))


def test_a_small_tree_is_open_and_each_level_stands_further_to_the_right():
    html = markup.render(page(branching(2, 2)))
    assert re.findall(r"<th scope=\"row\"[^>]*>([^<]*)", html) == ["net", *(f"\xa0\xa0p{at}" if not sub else f"\xa0\xa0\xa0\xa0q{sub - 1}" for at in range(2) for sub in range(3))]  # fmt: skip  # noqa: E501
    assert "<details" not in html


def test_of_a_long_tree_the_upper_levels_are_open_and_say_what_they_hold():
    opened, folded = markup.render(page(branching(10, 20))).split("<details", 1)
    assert opened.count('scope="row"') == 11
    assert opened.count("+ 20 inside") == 10
    assert folded.count('scope="row"') == 200
    assert ">p9.<wbr>q19<" in folded


def test_a_marked_row_of_a_long_tree_is_open_with_what_it_stands_in():
    opened = markup.render(page(branching(10, 20, marked=frozenset({25})))).split("<details", 1)[0]
    assert "q2 \N{HEAVY MULTIPLICATION X}<" in opened


def test_each_bar_is_an_image_with_words():
    html = markup.render(page(Bars("where", ("a", "b"), (Measure("params", (30, 10), "count"), Measure("bytes", (0, 2048), "bytes")))))
    assert re.findall(r'alt="([^"]*)" width="(\d+)"', html) == [("75%", "140"), ("25%", "47"), ("100%", "140")]
    assert {"30 · 75%", "10 · 25%", "2.0 KiB · 100%", "-"} <= set(re.findall(r">([^<>]+)<", html))


def test_the_part_of_a_line_that_is_at_fault_is_underlined():
    code = Code(((3, "y = log(a) + log(b)"), (4, "z = y")), 3, "In[1] line 3", (13, 19))
    html = markup.render(page(code))
    assert "log(b)</u>" in html
    assert "log(a) + <u" in html
    text = plain.render(page(code)).splitlines()
    line = next(at for at, one in enumerate(text) if "log(b)" in one)
    assert text[line + 1].index("^") == text[line].index("log(b)")
    assert text[line + 1].strip() == "^" * len("log(b)")


def test_a_traceback_keeps_its_lines():
    said = 'Traceback:\n  File "<a>", line 1\n    x < y'
    assert "Traceback:\n  File &quot;&lt;a&gt;&quot;, line 1\n    x &lt; y" in markup.render(page(Verbatim(said)))
    assert said in plain.render(page(Verbatim(said)))
