"""A chart is a small PNG with words, and leaves the user's matplotlib as it was."""

from __future__ import annotations

import base64
import io
import math
import re
import subprocess
import sys

import matplotlib as mpl
import pytest
from PIL import Image

from torchdebug_magics.html.page import Chart
from torchdebug_magics.html.pictures import chart, describe

PNG = b"\x89PNG\r\n"


def drawn(*values: float, log: bool = True) -> bytes:
    html = chart(Chart("loss", values, "step", "loss", log=log))
    found = re.search(r"base64,([^\"]+)", html)
    assert found, html
    return base64.b64decode(found[1])


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        (1.0, 2.0),
        (0.0, 0.0),
        (math.nan, math.inf),
        (1e-300, 1e300),
        (-1.0, -2.0),
        (1.0, -math.inf, 0.0),
        (3, 4),
        (5.0, 5.0),
        (math.inf,) * 500,
    ],
)
def test_whatever_the_values_a_png_is_drawn(values, log):
    assert drawn(*values, log=log).startswith(PNG)


def test_a_long_history_stays_small():
    assert len(drawn(*(1 + math.sin(step / 3) ** 2 for step in range(1000)))) < 24_000


def test_the_alt_text_says_what_is_drawn():
    html = chart(Chart("loss", (2.0, 8.0, math.nan, 4.0), "step", "loss"))
    assert 'alt="loss: 4 values; from 2.0 to 4.0, largest 8.0; 1 not finite"' in html


def test_the_words_for_nothing_finite():
    assert describe(Chart("loss", (math.nan,), "step", "loss")) == "loss: 1 value; 1 not finite"


def test_the_words_are_html_and_name_the_ends_of_both_axes():
    html = chart(Chart("loss", (2.0, math.nan, 8.0), "step", "loss", first_x=7))
    texts = re.findall(r">([^<>]+)<", html)
    assert texts == ["loss (red cross: not finite, first at 8)", "8.0", "2.0", "7", "step", "9"]


def test_the_image_is_transparent_so_that_it_reads_on_any_theme():
    image = Image.open(io.BytesIO(drawn(1.0, 2.0, math.nan))).convert("RGBA")
    lowest, highest = image.getchannel("A").getextrema()
    assert (lowest, highest) == (0, 255)
    assert image.getpixel((image.width // 4, 20))[3] == 0


def test_the_users_settings_are_neither_used_nor_changed():
    # Given a user who draws with LaTeX on black
    with mpl.rc_context({"text.usetex": True, "figure.facecolor": "black", "savefig.dpi": 3}):
        before = dict(mpl.rcParams)
        # When a chart is drawn
        ours = drawn(1.0, 2.0)
        # Then nothing has changed for either
        assert dict(mpl.rcParams) == before
    assert ours == drawn(1.0, 2.0)


def test_pyplot_is_never_imported_and_no_backend_is_chosen():
    code = (
        "import sys; from torchdebug_magics.html.pictures import chart; from torchdebug_magics.html.page import Chart;"
        "assert 'matplotlib' not in sys.modules;"
        "assert '<img' in chart(Chart('c', (1.0, 2.0), 'x', 'y'));"
        "import matplotlib; assert 'matplotlib.pyplot' not in sys.modules;"
        "assert matplotlib.rcParams._get_backend_or_none() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env={"PATH": ""} | {"PYTHONPATH": ":".join(sys.path)})


def test_a_title_is_never_read_as_a_formula():
    assert "<img" in chart(Chart("$\\frac{", (1.0, 2.0), "$x", "$\\y$"))
