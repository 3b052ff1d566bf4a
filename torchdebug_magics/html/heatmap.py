"""Values of many rows over the same columns, as colours: an image beside the names of its rows, or, live, coloured characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from torchdebug_magics.format import number, plural, sparkline
from torchdebug_magics.html import style
from torchdebug_magics.html.page import Heatmap
from torchdebug_magics.html.pictures import image
from torchdebug_magics.html.style import Markup, el, framed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NumberT = TypeVar("NumberT", int, float)
_MOST_ROWS = 48
_QUICK_COLUMNS = 64
_ROW_PX, _ROW_INCHES = 15, 0.15
_ZERO, _LOST = -1, -2
"""Levels of what has no place on the scale."""


def heatmap(block: Heatmap) -> Markup:
    """A row of text for each row of the image, so that the names stay text."""
    rows, scale = _shown(block), _Scale(block)
    levels = [[scale.level(value) for value in values] for _, values in rows]
    wide = max((len(row) for row in levels), default=0)
    if not wide:
        return Markup()
    try:
        cells = _characters(levels) if block.is_quick else [_image(levels, wide, describe(block))]
    except Exception:  # noqa: BLE001 - a picture that fails never costs the reader the verdict
        return el("p", describe(block), style=style.BLOCK)
    # One image beside all names, or a line of characters beside each.
    beside = [el("td", cell, rowspan="" if block.is_quick else len(rows), style=style.HEAT_CELL) for cell in cells]
    label = style.HEAT_NAME.format(height=_ROW_PX)
    lines = [el("tr", el("td", name, style=label), *beside[at : at + 1], style=style.CHART_ROW) for at, (name, _) in enumerate(rows)]
    last = f"{block.x_label} {wide * block.columns_per_value - 1:,}" if wide > 1 else ""
    ends = el("div", el("span", f"{block.x_label} 0"), el("span", last), style=style.HEAT_ENDS)
    lines.append(el("tr", el("td", style=label), el("td", ends, style=style.HEAT_CELL), style=style.CHART_ROW))
    more = len(block.rows) - len(rows)
    title = block.title + (f" ({len(rows)} of {plural(len(block.rows), 'row')}, evenly chosen)" if more else "")
    return framed(title, lines, below=el("div", *scale.key(levels), style=style.KEY))


def describe(block: Heatmap) -> str:
    """What the picture shows, in words."""
    values = [value for _, row in block.rows for value in row if value is not None and math.isfinite(value)]
    if not values:
        return f"{block.title}: no values"
    columns = max(len(row) for _, row in block.rows) * block.columns_per_value
    ends = f"from {number(float(min(values)))} to {number(float(max(values)))}"
    largest = max(block.rows, key=lambda row: max((one for one in row[1] if one is not None and math.isfinite(one)), default=-math.inf))
    return f"{block.title}: {plural(len(block.rows), 'row')} over {plural(columns, block.x_label)}, {ends}, largest in {largest[0]}"


def heat_lines(block: Heatmap) -> list[str]:
    """The rows as bars of text."""
    rows = _shown(block)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {sparkline([0.0 if one is None else one for one in _binned(values, 40)])}" for name, values in rows]


class _Scale:
    """From values to colours."""

    def __init__(self, block: Heatmap) -> None:
        known = [one for _, row in block.rows for one in row if one is not None and math.isfinite(one) and (one > 0 or not block.log)]
        self._log = block.log
        self.low, self.high = (min(known), max(known)) if known else (0.0, 1.0)
        if not block.log:
            self.low, self.high = min(0.0, self.low), max(1.0, self.high)

    def level(self, value: float | None) -> int | None:
        """The place of a colour; None where there is nothing."""
        if value is None:
            return None
        if not math.isfinite(value):
            return _LOST
        if self._log and value <= 0:
            return _ZERO
        low, high, here = (math.log(one) for one in (self.low, self.high, value)) if self._log else (self.low, self.high, value)
        return round((here - low) / (high - low) * (len(style.HEAT) - 1)) if high > low else len(style.HEAT) // 2

    def key(self, levels: Sequence[Sequence[int | None]]) -> list[Markup]:
        """The ends of the scale, and what lies outside it."""
        used = {one for row in levels for one in row}
        squares = [_swatch(colour) for colour in style.HEAT]
        said = [el("span", f"{number(float(self.low))} ", *squares, f" {number(float(self.high))}", style=style.KEY_ENTRY)]
        for level, word in ((_ZERO, "zero"), (_LOST, "NaN or inf")):
            if level in used:
                said.append(el("span", _swatch(_colour(level)), f" {word}", style=style.KEY_ENTRY))
        return said


def _swatch(colour: str) -> Markup:
    """A patch of colour; not a character, as the ends of the scale are too faint for text."""
    return el("span", "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}", style=style.SWATCH.format(colour=colour))


def _shown(block: Heatmap) -> list[tuple[str, tuple[float | None, ...]]]:
    count = len(block.rows)
    if count <= _MOST_ROWS:
        return list(block.rows)
    return [block.rows[round(at * (count - 1) / (_MOST_ROWS - 1))] for at in range(_MOST_ROWS)]


def _colour(level: int | None) -> str:
    outside = {None: "transparent", _ZERO: style.CHART_FRAME, _LOST: style.CHART_BAD}
    return outside[level] if level is None or level < 0 else style.HEAT[level]


def _characters(levels: Sequence[Sequence[int | None]]) -> list[Markup]:
    wide = max(len(row) for row in levels)
    rows = [_binned([*row, *[None] * (wide - len(row))], _QUICK_COLUMNS) for row in levels]
    return [
        el(
            "span",
            *(el("span", "█" * len(list(group)), style=f"color:{_colour(level)}") for level, group in groupby(row)),
            style=style.HEAT_TEXT,
        )
        for row in rows
    ]


def _binned(values: Sequence[NumberT | None], most: int) -> list[NumberT | None]:
    """At most so many columns: the largest of each."""
    step = max(1, math.ceil(len(values) / most))
    bins = (values[at : at + step] for at in range(0, len(values), step))
    return [max((one for one in each if one is not None), default=None) for each in bins]


def _image(levels: Sequence[Sequence[int | None]], wide: int, alt: str) -> Markup:
    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgba  # noqa: PLC0415 - half a second, and only where there is something to draw

        cells = [
            [to_rgba(_colour(row[at])) if at < len(row) and row[at] is not None else (0, 0, 0, 0) for at in range(wide)] for row in levels
        ]
        axes.imshow(cells, aspect="auto", interpolation="nearest")
        axes.set_axis_off()

    return image(draw, alt, height=max(0.3, _ROW_INCHES * len(levels)), css_height=_ROW_PX * len(levels))
