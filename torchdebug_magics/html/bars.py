"""Bars side by side: a table in which each number has a bar, an image of one dot drawn as wide as the number is large."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING

from torchdebug_magics.format import cell, share
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, prose

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Bars, Measure

__all__ = ["bars", "shares"]

_WIDTH, _HEIGHT = 140, 12
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def bars(block: Bars) -> Markup:
    """One row a thing, two columns a quantity: the bar, and the number beside it."""
    dots = [_dot(style.KINDS.get(label, style.CHART_LINE)) for label in block.labels]
    heads = [el("th", one.name, scope="col", colspan=2, style=style.HEAD.format(side="left")) for one in block.measures]
    rows = [
        el("tr", el("th", label, scope="row", style=style.ROW_NAME), *(part for one in block.measures for part in _pair(one, at, dots[at])))
        for at, label in enumerate(block.labels)
    ]
    whole = el(
        "table",
        el("caption", prose(block.title, code_style=style.INLINE_CODE), style=style.CAPTION),
        el("thead", el("tr", el("th", "", scope="col", style=style.HEAD.format(side="left")), *heads)),
        el("tbody", *rows),
        style=style.TABLE,
        cellpadding=4,
    )
    return el("div", whole, style=style.BLOCK)


def shares(measure: Measure) -> tuple[float, ...]:
    """Of the sum."""
    total = sum(measure.values)
    return tuple(value / total if total else 0.0 for value in measure.values)


def _pair(measure: Measure, at: int, dot: str) -> tuple[Markup, Markup]:
    value, part = measure.values[at], shares(measure)[at]
    longest = max(measure.values) or 1
    wide = max(1, round(_WIDTH * value / longest)) if value else 0
    image = el("img", src=dot, alt=share(part), width=wide, height=_HEIGHT, style=style.BAR.format(wide=wide)) if wide else ""
    said = f"{cell(value, measure.format)} · {share(part)}" if value else "-"
    return el("td", image, width=_WIDTH, style=style.BAR_CELL.format(wide=_WIDTH)), el("td", said, style=style.BAR_WORD)


def _dot(colour: str) -> str:
    """A PNG of one dot, without any library."""
    rows = b"\0" + bytes.fromhex(colour[1:])
    parts = (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    chunks = b"".join(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    data = base64.b64encode(_SIGNATURE + chunks).decode("ascii")
    return f"data:image/png;base64,{data}"
