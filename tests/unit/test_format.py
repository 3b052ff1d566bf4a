"""The only formatter, at its edges."""

from __future__ import annotations

import math

import pytest

from torchdebug_magics import format as fmt

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1023.99, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5 * 1024**5, "5120.0 TiB"),
        (NAN, "nan B"),
        (INF, "inf B"),
    ],
)
def test_byte_size(value, text):
    assert fmt.byte_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (9999.7, "10K"),
        (10_000, "10K"),
        (-10_000, "-10K"),
        (999_499, "999K"),
        (999_999, "1M"),
        (1_234_567, "1.23M"),
        (7e9, "7G"),
        (1.5e12, "1.5T"),
        (NAN, "nan"),
        (-INF, "-inf"),
    ],
)
def test_count(value, text):
    assert fmt.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 µs"),
        (5e-7, "0.5 µs"),
        (9.999e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (59.99, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3725, "1 h 02 min"),
        (-0.5, "-500 ms"),
        (NAN, "?"),
        (INF, "?"),
    ],
)
def test_duration(value, text):
    assert fmt.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (3, "3"),
        (True, "True"),
        (65504.0, "65504.0"),
        (1234.6, "1235"),
        (0.1 + 0.2, "0.3"),
        (1e-12, "1e-12"),
        (3.4e38, "3.4e+38"),
        (NAN, "nan"),
        (-INF, "-inf"),
        (1 + 2j, "1.0+2.0j"),
        (1 - 2j, "1.0-2.0j"),
        (complex(NAN, INF), "nan+infj"),
        (complex(0, -0.0), "0.0-0.0j"),
    ],
)
def test_number(value, text):
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0%"), (0.0312, "3.1%"), (1.0, "100%"), (15.267, "15x"), (2e6, "> 1,000x"), (-0.5, "-50%"), (4.9e-5, "0.0049%"), (NAN, "?")],
)
def test_share(value, text):
    assert fmt.share(value) == text


def test_shape():
    assert [fmt.shape(sizes) for sizes in ((), (3,), (3, 0, 4))] == ["()", "3", "3 x 0 x 4"]


def test_plural():
    assert [fmt.plural(0, "step"), fmt.plural(1, "pass", "es"), fmt.plural(1200, "pass", "es")] == ["0 steps", "1 pass", "1,200 passes"]


def test_one_line_disarms_what_a_terminal_would_obey():
    assert fmt.one_line("a\nb\t\x1b[31mred") == "a b \N{REPLACEMENT CHARACTER}[31mred"


def test_cell_writes_each_format_and_a_dash_for_nothing():
    written = [fmt.cell(None, "count"), fmt.cell(20_000, "count"), fmt.cell(0.5, "number"), fmt.cell(2048, "bytes"), fmt.cell(2, "seconds")]
    assert written == ["-", "20K", "0.5", "2.0 KiB", "2 s"]
    assert [fmt.cell(0.5, "share"), fmt.cell("a\nb"), fmt.cell("x", "count"), fmt.cell(3)] == ["50%", "a b", "x", "3"]


def test_sparkline():
    assert fmt.sparkline([]) == ""
    assert fmt.sparkline([1, 10, 100]) == "▁▅█"
    assert fmt.sparkline([5, 5]) == "▅▅"
    assert fmt.sparkline([0.0, 1.0, NAN, INF]) == "▁▅!!"
    assert fmt.sparkline(range(1, 100), width=3) == fmt.sparkline([97, 98, 99])


@pytest.mark.parametrize(
    ("words", "text"), [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d", "e"], "a, b, c and 2 more")]
)
def test_listed(words, text):
    assert fmt.listed(words) == text
