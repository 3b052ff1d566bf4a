"""One function builds every element, and it escapes."""

from __future__ import annotations

import re

from torchdebug_magics.html.style import Markup, el, join, prose


def test_text_and_attributes_are_escaped():
    assert el("td", "a < b & 'c'", title='"><script>') == ('<td title="&quot;&gt;&lt;script&gt;">a &lt; b &amp; &#x27;c&#x27;</td>')


def test_markup_is_trusted_once():
    assert el("tr", el("td", "<")) == "<tr><td>&lt;</td></tr>"
    assert isinstance(el("p"), Markup)


def test_empty_attributes_are_left_out_and_void_elements_are_not_closed():
    assert el("p", "x", style="") == "<p>x</p>"
    assert el("img", src="a", width=0) == '<img src="a" width="0">'
    assert el("br") == "<br>"


def test_join_mixes_markup_and_text():
    assert join([el("b", "x"), "<"]) == "<b>x</b>&lt;"


def test_backticks_are_code_and_an_odd_one_is_itself():
    assert re.sub(" style=.*?>", ">", prose("use `a < b` here")) == "use <code>a &lt; b</code> here"
    assert prose("it`s") == "it`s"


def test_what_cannot_be_encoded_or_stored_is_replaced():
    el("p", "\udc80\0").encode("utf-8")
    assert "\0" not in el("p", "\0")
