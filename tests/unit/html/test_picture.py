"""An image between its words; where it cannot be drawn, the words alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics.html.page import Areas, Chart
from torchdebug_magics.html.pictures import areas, chart, picture
from torchdebug_magics.html.style import el

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def line(axes: Axes) -> None:
    axes.plot([1, 2], [3, 4])


@pytest.mark.parametrize(("below", "wide"), [(["step"], ""), (["0", "step", "9"], ' colspan="3"')])
def test_the_image_is_as_wide_as_the_words_below_it(below, wide):
    html = picture(line, "loss", top="8", bottom="2", below=below, alt="a line", height=1.0, otherwise="")
    assert f'<td rowspan="2"{wide} style=' in html
    assert re.findall(r">([^<>]+)<", html) == ["loss", "8", "2", *below]


def test_the_key_stands_under_the_image_and_words_are_escaped():
    html = picture(line, "a `b`", top="<8>", bottom="2", below=["step"], alt="", height=1.0, otherwise="", key=[el("span", "■ weights")])
    assert re.findall(r">([^<>]+)<", html) == ["a ", "b", "&lt;8&gt;", "2", "step", "■ weights"]


def test_what_cannot_be_drawn_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchdebug_magics.html.pictures.base64", None)
    losses = chart(Chart("loss <1>", (1.0, 2.0), "step", "loss"))
    held = areas(Areas("Held", (("weights", (1, 2)),), "count", "events", (("forward", 0),), 1))
    assert "<img" not in losses + held
    assert "loss &lt;1&gt;: ▁█ loss &lt;1&gt;: 2 values; from 1.0 to 2.0, largest 2.0" in losses
    assert "Held: at most 2: weights 2" in held
