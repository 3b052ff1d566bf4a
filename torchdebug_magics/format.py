"""Bytes, counts, durations, shapes and numbers as text: the only formatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

Format: TypeAlias = Literal["count", "number", "bytes", "seconds", "share", "text", "prose", "code"]
"""Format of a table column: ``"text"`` is a word or two, ``"prose"`` may be long, ``"code"`` is source code."""
_BARS = "▁▂▃▄▅▆▇█"
_KILO, _KIBI, _MINUTE = 1000, 1024, 60
_IN_FULL = 10_000
_AT_A_GLANCE = 3
"""Words listed before "and N more"."""


def byte_size(size_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value, text = float(size_bytes), f"{size_bytes:.0f}"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if not abs(float(text)) >= _KIBI or math.isinf(value):
            return f"{text} {unit}"
        value /= _KIBI
        text = f"{value:.1f}"
    return f"{text} TiB"


def count(value: float) -> str:
    """``1_234_567`` -> ``1.23M``; below 10,000 in full with separators."""
    if not math.isfinite(value) or abs(round(value)) < _IN_FULL:
        return f"{value:,.0f}"
    for unit in ("K", "M", "G"):
        value /= _KILO
        if abs(float(text := f"{value:.3g}")) < _KILO:
            return f"{text}{unit}"
    return f"{value / _KILO:.3g}T"


def duration(seconds_s: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if not math.isfinite(seconds_s):
        return "?"
    if seconds_s < 0:
        return f"-{duration(-seconds_s)}"
    for scale, unit, limit in ((1e6, "µs", _KILO), (1e3, "ms", _KILO), (1, "s", _MINUTE)):
        if float(text := f"{seconds_s * scale:.3g}") < limit:
            return f"{text} {unit}"
    minutes, rest = divmod(round(seconds_s), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def number(value: complex) -> str:
    """A tensor element, short but exact for whole numbers and non-finite values (``0.0``, ``65504.0``, ``nan``, ``-inf``)."""
    if isinstance(value, complex):
        imaginary = number(value.imag)
        return f"{number(value.real)}{'' if imaginary.startswith('-') else '+'}{imaginary}j"
    if isinstance(value, float):
        exact = value.is_integer() and abs(value) < _KILO * _KILO
        return f"{value:.1f}" if exact else f"{value:.4g}"
    return str(value)


def share(ratio: float) -> str:
    """``0.0312`` -> ``3.1%``; from 10 on, as a multiple: ``> 1,000x``."""
    if not math.isfinite(ratio):
        return "?"
    if abs(ratio) >= 10:  # noqa: PLR2004 - a percentage of four digits is read by nobody
        return f"{ratio:,.0f}x" if abs(ratio) <= 1000 else "> 1,000x"  # noqa: PLR2004 - beyond it, a multiple says nothing
    percent = 100 * ratio
    return f"{percent:,.0f}%" if percent.is_integer() or abs(percent) >= 99.5 else f"{percent:.2g}%"  # noqa: PLR2004 - which 2 digits cannot say


def shape(sizes: Sequence[int]) -> str:
    """``(3, 4)`` -> ``3 x 4``; a scalar is ``()``."""
    return " x ".join(str(size) for size in sizes) if sizes else "()"


def plural(amount: int, noun: str, ending: str = "s") -> str:
    """``1 step``, ``1,200 steps``, ``2 passes``."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}{ending}"


def signed(size_bytes: int) -> str:
    """``+1.5 MiB``."""
    return f"{'-' if size_bytes < 0 else '+'}{byte_size(abs(size_bytes))}"


def listed(words: Sequence[str]) -> str:
    """``a, b, c and 2 more``."""
    more = len(words) - _AT_A_GLANCE
    return ", ".join(words[:_AT_A_GLANCE]) + (f" and {more} more" if more > 0 else "")


def capitalised(sentence: str) -> str:
    """Capitalize the first letter; a sentence that begins with code is unchanged."""
    return sentence[:1].upper() + sentence[1:]


def one_line(text: str) -> str:
    """Make a user's text safe for a terminal: no line break, no escape sequence."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "\N{REPLACEMENT CHARACTER}" for char in text)


def cell(value: str | float | None, how: Format = "text") -> str:
    """A formatted table cell; a dash for None."""
    if value is None:
        return "-"
    return one_line(value) if isinstance(value, str) else _WRITERS[how](value)


def sparkline(values: Sequence[float], *, width: int = 40, span: tuple[float, float] | None = None) -> str:
    """The last `width` values as bars on a logarithmic scale; ``!`` marks a non-finite one.

    With `span`, the scale goes from its lower to its upper end, and all values are shown, evenly thinned out.
    """
    tail = list(values[-width:]) if span is None else list(values[:: max(1, math.ceil(len(values) / width))])
    logs = [math.log10(abs(value)) for value in span or tail if math.isfinite(value) and value]
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
    return "".join(_bar(value, low, high) for value in tail)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    if not value:
        return _BARS[0]
    level = (math.log10(abs(value)) - low) / (high - low) if high > low else 0.5
    return _BARS[round(min(max(level, 0.0), 1.0) * (len(_BARS) - 1))]


_WRITERS: Mapping[Format, Callable[[Any], str]] = {
    "count": count,
    "number": number,
    "bytes": byte_size,
    "seconds": duration,
    "share": share,
    "text": str,
    "prose": str,
    "code": str,
}
