"""Bytes, counts, durations, shapes and numbers as text: the only formatter."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["byte_size", "count", "duration", "number", "plural", "shape", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def byte_size(size_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:  # noqa: PLR2004 - the binary prefix itself
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def count(value: float) -> str:
    """``1_234_567`` -> ``1.23M``; below 10,000 in full with separators."""
    size = abs(value)
    for floor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if size >= floor:
            scale = 1e3 if unit == "K" else floor
            return f"{value / scale:.3g}{unit}"
    return f"{value:,.0f}"


def duration(seconds_s: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if not math.isfinite(seconds_s):
        return "?"
    if seconds_s < 1e-3:  # noqa: PLR2004
        return f"{seconds_s * 1e6:.0f} µs"
    if seconds_s < 1:
        return f"{seconds_s * 1e3:.3g} ms"
    if seconds_s < 60:  # noqa: PLR2004
        return f"{seconds_s:.3g} s"
    minutes, rest = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def number(value: complex) -> str:
    """A tensor's element: short, exact where it matters (``0.0``, ``nan``, ``-inf``)."""
    if isinstance(value, complex):
        return f"{number(value.real)}{'+' if not value.imag < 0 else ''}{number(value.imag)}j"
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        text = f"{value:.4g}"
        return text if any(mark in text for mark in ".einf") else f"{text}.0"
    return str(value)


def shape(sizes: Sequence[int]) -> str:
    """``(3, 4)`` -> ``3 x 4``; a scalar is ``()``."""
    return " x ".join(str(size) for size in sizes) if sizes else "()"


def plural(amount: int, noun: str) -> str:
    """``1 step``, ``1,200 steps``."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The last `width` values as bars on a logarithmic scale; ``!`` marks a non-finite one."""
    tail = list(values[-width:])
    logs = [math.log10(abs(value)) for value in tail if math.isfinite(value) and value]
    low, high = (min(logs), max(logs)) if logs else (0.0, 0.0)
    return "".join(_bar(value, low, high) for value in tail)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    if not value:
        return _BARS[0]
    share = (math.log10(abs(value)) - low) / (high - low) if high > low else 0.5
    return _BARS[round(share * (len(_BARS) - 1))]
