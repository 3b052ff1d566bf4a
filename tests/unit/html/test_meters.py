"""How full memories are: a bar, the same in words, and what it is made of."""

from __future__ import annotations

import pytest

from torchdebug_magics.html import markup, plain
from torchdebug_magics.html.markup import details, level
from torchdebug_magics.html.page import Meters, Page
from torchdebug_magics.report import Gauge

GIB = 2**30
FULL = Gauge("GPU 0 · NVIDIA T4", 12 * GIB, 16 * GIB, (("allocated", 9 * GIB), ("unaccounted", 3 * GIB)), "measured by the driver")
NO_LIMIT = Gauge("this process", GIB, None)
NOTHING = Gauge("GPU", 0, None, note="no driver <b>")


def shown(*gauges: Gauge) -> tuple[str, str]:
    page = Page("memgauge", "info", "v", (Meters("Memory", gauges),))
    return plain.render(page), markup.render(page)


def test_the_level_in_words():
    assert level(FULL) == "12.0 GiB of 16.0 GiB (75%)"
    assert level(NO_LIMIT) == "1.0 GiB"
    assert level(NOTHING) == ""
    assert level(Gauge("a limit of nothing", 5, 0)) == "5 B of 0 B (0%)"
    assert details(FULL) == "allocated 9.0 GiB, unaccounted 3.0 GiB; measured by the driver"


def test_a_gauge_is_a_meter_with_its_words_beside_it():
    _, html = shown(FULL, NO_LIMIT, NOTHING)
    assert html.count("<meter ") == 1
    assert f'min="0" max="{16 * GIB}"' in html
    assert f'value="{12 * GIB}"' in html
    assert html.count("12.0 GiB of 16.0 GiB (75%)") == 2  # inside, for a reader without meters, and beside it
    assert "<b>" not in html


def test_more_than_the_limit_still_fits_its_meter():
    assert f'value="{GIB}"' in shown(Gauge("addresses", 3 * GIB, GIB))[1]
    assert "3.0 GiB of 1.0 GiB (300%)" in shown(Gauge("addresses", 3 * GIB, GIB))[1]


def test_as_text():
    text, _ = shown(FULL, NO_LIMIT, NOTHING)
    assert text.splitlines()[2:] == [
        "Memory",
        "  GPU 0 · NVIDIA T4  ████████████░░░░  12.0 GiB of 16.0 GiB (75%)",
        "                     allocated 9.0 GiB, unaccounted 3.0 GiB; measured by the driver",
        "  this process                         1.0 GiB",
        "  GPU                no driver <b>",
    ]


@pytest.mark.parametrize("gauge", [Gauge("x", 1, 2, note="many words " * 30), Gauge("x", 0, None, note="many words " * 30)])
def test_long_notes_are_wrapped(gauge: Gauge):
    assert max(map(len, shown(gauge)[0].splitlines())) <= 100
