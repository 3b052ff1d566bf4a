"""How full memories are: a `<meter>` each, with the same in words beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import byte_size, share
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, prose

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Meters
    from torchdebug_magics.report import Gauge

__all__ = ["details", "level", "meters"]

_HIGH, _FULL = 0.75, 0.9
"""Shares from which a browser draws the bar in its colours for caution and for danger."""


def meters(block: Meters) -> Markup:
    """One row a memory."""
    title = el("caption", prose(block.title, code_style=style.INLINE_CODE), style=style.CAPTION) if block.title else ""
    return el("div", el("table", title, el("tbody", *map(_row, block.gauges)), style=style.FACTS), style=style.BLOCK)


def level(gauge: Gauge) -> str:
    """``3.2 GiB of 12.7 GiB (25%)``; empty where nothing can be told."""
    if gauge.limit_bytes is None:
        return byte_size(gauge.used_bytes) if gauge.used_bytes else ""
    ratio = gauge.used_bytes / gauge.limit_bytes if gauge.limit_bytes else 0.0
    return f"{byte_size(gauge.used_bytes)} of {byte_size(gauge.limit_bytes)} ({share(round(ratio, 2))})"


def details(gauge: Gauge) -> str:
    """What it is made of, and what there is to know."""
    parts = ", ".join(f"{name} {byte_size(size_bytes)}" for name, size_bytes in gauge.parts)
    return "; ".join(filter(None, (parts, gauge.note)))


def _row(gauge: Gauge) -> Markup:
    said, more = level(gauge), details(gauge)
    words = [said] if said else []
    if more:
        words += [el("div", more, style=style.METER_MORE)] if said else [more]
    return el(
        "tr",
        el("th", gauge.label, scope="row", style=style.FACT_NAME),
        el("td", _meter(gauge, said), style=style.METER_CELL),
        el("td", *words, style=style.FACT),
        style=style.FACT_ROW,
    )


def _meter(gauge: Gauge, said: str) -> Markup:
    if not gauge.limit_bytes:
        return Markup()
    high, full = int(_HIGH * gauge.limit_bytes), int(_FULL * gauge.limit_bytes)
    used = min(gauge.used_bytes, gauge.limit_bytes)
    return el("meter", said, min=0, max=gauge.limit_bytes, low=high, high=full, optimum=0, value=used, style=style.METER)
