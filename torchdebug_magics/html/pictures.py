"""Charts and heatmaps: the picture is a transparent PNG in colours that show on any background, its words are HTML in the theme's colour.

A heatmap is an image beside the names of its rows or, live, coloured characters.
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from torchdebug_magics.format import cell, number, plural, sparkline
from torchdebug_magics.html import style
from torchdebug_magics.html.page import Areas, Chart, Heatmap
from torchdebug_magics.html.style import Markup, el, framed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image


_HEIGHT = 1.6
_MANY = 180
"""Values from which their dots would touch."""
_MARGIN = 0.08
"""Above the largest and below the smallest value, as a share of the height between them."""
_LOST = 0.9
"""How high the mark of a non-finite value stands, as a share of the height."""
_WIDTH, _DPI = 7.2, 160
_CSS_WIDTH = 720
_COLOURS = 32
"""In the palette of the image, which is then four times smaller."""
_AREAS_HEIGHT = 2.4
_STRIP = 0.06
"""How high the strip is that says what went on, as a share of the height."""
NumberT = TypeVar("NumberT", int, float)
_MOST_ROWS = 48
_QUICK_COLUMNS = 64
_ROW_PX, _ROW_INCHES = 15, 0.15
_ZERO, _UNKNOWN = -1, -2
"""Levels of what has no place on the scale."""


def chart(block: Chart) -> Markup:
    """An image between its words; where it cannot be drawn, bars of text."""
    alt = describe(block)
    shown = [value for value in _drawn(block) if not math.isnan(value)]
    ends = block.span or ((min(shown), max(shown)) if shown else None)
    low, high = ("", "") if ends is None else (number(float(ends[0])), number(float(ends[1])))
    first, last = block.ends or (f"{block.first_x:,}", f"{block.first_x + len(block.values) - 1:,}")
    lost = next((step for step, value in enumerate(block.values, block.first_x) if not math.isfinite(value)), None)
    said = "" if lost is None else f" (red cross: not finite, first at {lost:,})"
    return picture(
        lambda axes: _draw(axes, block),
        f"{block.title}{said}",
        top=high,
        bottom=low if low != high else "",
        below=(first, block.x_label, last),
        alt=alt,
        height=_HEIGHT,
        otherwise=f"{block.title}: {sparkline(block.values, span=block.span)} {alt}",
    )


def describe(block: Chart) -> str:
    """What the chart shows, in words."""
    finite = [value for value in block.values if math.isfinite(value)]
    lost = len(block.values) - len(finite)
    parts = [f"{block.title}: {plural(len(block.values), 'value')}"]
    if finite:
        parts.append(f"from {number(float(finite[0]))} to {number(float(finite[-1]))}, largest {number(float(max(finite)))}")
    if lost:
        parts.append(f"{lost:,} not finite")
    return "; ".join(parts)


def _drawn(block: Chart) -> list[float]:
    """The values that have a place on the scale, NaN for the others."""
    return [float(value) if math.isfinite(value) and (value > 0 or not block.log) else math.nan for value in block.values]


def _draw(axes: Axes, block: Chart) -> None:
    steps = range(block.first_x, block.first_x + len(block.values))
    drawn = _drawn(block)
    axes.plot(steps, drawn, color=style.CHART_LINE, linewidth=1.6, marker="o", markersize=2.5 if len(drawn) <= _MANY else 0)
    lost = [step for step, value in zip(steps, block.values, strict=True) if not math.isfinite(value)]
    across = axes.get_xaxis_transform()
    axes.vlines(lost, 0, 1, color=style.CHART_BAD, linewidth=1.0, linestyle="--", transform=across)
    axes.plot(lost, [_LOST] * len(lost), "x", color=style.CHART_BAD, markersize=7, markeredgewidth=2, transform=across)
    _dress(axes, block, [value for value in drawn if not math.isnan(value)])


def _dress(axes: Axes, block: Chart, shown: list[float]) -> None:
    """No words here: a frame, and a line at each end of the scale, whose values stand beside the image."""
    axes.set_xmargin(0.02)
    axes.set_ymargin(_MARGIN)
    if block.log and shown:
        axes.set_yscale("log")
    if block.span is not None:  # a little more at both ends, so that a line along one of them is seen whole
        low, high = block.span
        if block.log and low > 0:
            factor = (high / low) ** _MARGIN if high > low else 1 + _MARGIN
            axes.set_ylim(low / factor, high * factor)
        else:
            more = _MARGIN * ((high - low) or 1.0)
            axes.set_ylim(low - more, high + more)
    _frame(axes)
    if shown:
        axes.hlines(
            (min(shown), max(shown)), 0, 1, color=style.CHART_FRAME, linewidth=0.5, linestyle=":", transform=axes.get_yaxis_transform()
        )


def picture(  # noqa: PLR0913 - what stands around an image
    draw: Callable[[Axes], None],
    caption: str,
    *,
    top: str,
    bottom: str,
    below: Sequence[str],
    alt: str,
    height: float,
    otherwise: str,
    key: Sequence[Markup] = (),
) -> Markup:
    """What `draw` puts on axes, `height` inches high; the sentence `otherwise` where it cannot be drawn.

    `top` and `bottom` stand at the ends of the scale, `below` one word in the middle, or three at the left, in the middle and at the right.
    """
    try:
        drawn = image(draw, alt, height=height)
    except Exception:  # noqa: BLE001 - a picture that fails never costs the reader the verdict
        return el("p", otherwise, style=style.BLOCK)
    sides = ["center"] if len(below) == 1 else ["left", "center", "right"]
    # The image is as high as both ends of the scale, and as wide as all that stands below it.
    shown = el("td", drawn, rowspan=2, colspan=len(below) if len(below) > 1 else "", style=style.CHART_IMAGE)
    rows = [
        [_word(top, "right", "top"), shown],
        [_word(bottom, "right", "bottom")],
        [_word("", "left", "top"), *(_word(text, side, "top") for text, side in zip(below, sides, strict=True))],
    ]
    # Below the table: within it, a long key would widen the column of the image, and part the image from its scale.
    below_it = el("div", *key, style=style.KEY) if key else ""
    return framed(caption, (el("tr", *cells, style=style.CHART_ROW) for cells in rows), below=below_it)


def _word(text: str, side: str, edge: str) -> Markup:
    return el("td", text, style=style.CHART_WORD.format(side=side, edge=edge))


def image(draw: Callable[[Axes], None], alt: str, *, height: float, css_height: int | None = None) -> Markup:
    """What `draw` puts on axes that fill the picture, `height` inches of 7.2 high; shown so many pixels high, or in proportion."""
    return el(
        "img",
        src=_drawn_url(draw, height),
        alt=alt,
        width=_CSS_WIDTH,
        style=style.IMAGE if css_height is None else style.IMAGE_OF_ROWS.format(height=css_height),
    )


def _drawn_url(draw: Callable[[Axes], None], height: float) -> str:
    import matplotlib.style  # noqa: PLC0415 - half a second, and only where there is something to draw
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above
    from PIL import Image  # noqa: PLC0415 - matplotlib's own way to write a PNG

    with warnings.catch_warnings(), matplotlib.style.context("default"):  # what the user has set does not show here, and is put back
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="none")
        canvas = FigureCanvasAgg(figure)
        draw(figure.add_axes((0.0, 0.0, 1.0, 1.0), facecolor="none"))
        canvas.draw()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()), "raw", "RGBA", 0, 1)
    return _url(picture.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE))


def dot(colour: str) -> str:
    """The URL of an image of one dot, which is as wide and high as it is told to be."""
    from PIL import Image  # noqa: PLC0415 - as above

    return _url(Image.new("RGB", (1, 1), colour))


def _url(picture: Image) -> str:
    target = io.BytesIO()
    picture.save(target, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode('ascii')}"


def areas(block: Areas) -> Markup:
    """The image between its words; where it cannot be drawn, the words."""
    alt = describe_areas(block)
    bottom = cell(block.bottom, block.format) if block.bottom else "0"
    return picture(
        lambda axes: _draw_areas(axes, block),
        block.title,
        top=cell(_top(block), block.format),
        bottom=bottom,
        below=(block.x_label,),
        alt=alt,
        height=_AREAS_HEIGHT,
        otherwise=f"{block.title}: {alt}",
        key=_key(block),
    )


def describe_areas(block: Areas) -> str:
    """What the picture shows, in words."""
    at = ", ".join(f"{name} {cell(values[block.marked], block.format)}" for name, values in block.series if values[block.marked])
    most = f"at most {cell(max(totals(block), default=0.0), block.format)}: {at}"
    heights = totals(block)
    marks = ", ".join(f"{number} {name} {cell(heights[point], block.format)}" for number, (name, point) in enumerate(block.marks, 1))
    return f"{most}; at the marks: {marks}" if marks else most


def totals(block: Areas) -> list[float]:
    """The upper edge."""
    return [sum(values) for values in zip(*(values for _, values in block.series), strict=True)]


def _top(block: Areas) -> float:
    return max(totals(block), default=0.0) if block.top is None else block.top


def _key(block: Areas) -> list[Markup]:
    """A coloured square and a name each; the strip's colours after them."""
    said = [
        el("span", el("span", "■ ", style=f"color:{colour}"), name, style=style.KEY_ENTRY)
        for (name, _), colour in zip(block.series, _area_colours(block), strict=True)
    ]
    if strip := _strip_colours(block):
        said += [el("span", "strip below:", style=style.KEY_ENTRY)]
        said += [el("span", el("span", "▬ ", style=f"color:{colour}"), name, style=style.KEY_ENTRY) for name, colour in strip.items()]
    if block.marks:
        said += [el("span", "marks:", style=style.KEY_ENTRY)]
        said += [el("span", f"┆ {number} {name}", style=style.KEY_ENTRY) for number, (name, _) in enumerate(block.marks, 1)]
    return said


def _area_colours(block: Areas) -> list[str]:
    return style.colours([name for name, _ in block.series], style.KINDS, style.AREAS)


def _strip_colours(block: Areas) -> dict[str, str]:
    named = list(dict.fromkeys(name for name, _ in block.stretches))
    return dict(zip(named, style.colours(named, style.PHASES, style.STRIPES), strict=True))


def _draw_areas(axes: Axes, block: Areas) -> None:
    count = len(block.series[0][1])
    edges = range(count)
    most, low = _top(block) or 1.0, block.bottom
    high = (most - low) or 1.0
    axes.set_xlim(0, max(1, count - 1))
    axes.set_ylim(low - _STRIP * 1.5 * high, low + high * 1.04)
    lower = [low] * count
    total = [0.0] * count
    for colour, (_, values) in zip(_area_colours(block), block.series, strict=True):
        total = [below + value for below, value in zip(total, values, strict=True)]
        upper = [max(low, value) for value in total]
        axes.fill_between(edges, lower, upper, color=colour, step="post", linewidth=0)
        lower = upper
    strip = _strip_colours(block)
    for (name, first), (_, end) in zip(block.stretches, [*block.stretches[1:], ("", count)], strict=False):
        axes.barh(low - _STRIP * high, max(end - first, 1), left=first, height=_STRIP * high, color=strip[name], linewidth=0)
    for mark, (_, point) in enumerate(block.marks, 1):
        axes.axvline(point, color=style.CHART_FRAME, linewidth=1.0, linestyle=":")
        axes.text(point, most, f" {mark}", color=style.CHART_FRAME, fontsize=8, va="top")
    axes.axvline(block.marked, color=style.CHART_BAD, linewidth=1.2, linestyle="--")
    _frame(axes)


def _frame(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_yticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(style.CHART_FRAME)


def heatmap(block: Heatmap) -> Markup:
    """A row of text for each row of the image, so that the names stay text."""
    rows, scale = _shown(block), _Scale(block)
    levels = [[scale.level(value) for value in values] for _, values in rows]
    wide = max((len(row) for row in levels), default=0)
    if not wide:
        return Markup()
    try:
        cells = _characters(levels) if block.is_quick else [_image_of_rows(levels, wide, describe_heatmap(block))]
    except Exception:  # noqa: BLE001 - a picture that fails never costs the reader the verdict
        return el("p", describe_heatmap(block), style=style.BLOCK)
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


def describe_heatmap(block: Heatmap) -> str:
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
            return _UNKNOWN
        if self._log and value <= 0:
            return _ZERO
        low, high, here = (math.log(one) for one in (self.low, self.high, value)) if self._log else (self.low, self.high, value)
        return round((here - low) / (high - low) * (len(style.HEAT) - 1)) if high > low else len(style.HEAT) // 2

    def key(self, levels: Sequence[Sequence[int | None]]) -> list[Markup]:
        """The ends of the scale, and what lies outside it."""
        used = {one for row in levels for one in row}
        squares = [_swatch(colour) for colour in style.HEAT]
        said = [el("span", f"{number(float(self.low))} ", *squares, f" {number(float(self.high))}", style=style.KEY_ENTRY)]
        for level, word in ((_ZERO, "zero"), (_UNKNOWN, "NaN or inf")):
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
    outside = {None: "transparent", _ZERO: style.CHART_FRAME, _UNKNOWN: style.CHART_BAD}
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


def _image_of_rows(levels: Sequence[Sequence[int | None]], wide: int, alt: str) -> Markup:
    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgba  # noqa: PLC0415 - half a second, and only where there is something to draw

        cells = [
            [to_rgba(_colour(row[at])) if at < len(row) and row[at] is not None else (0, 0, 0, 0) for at in range(wide)] for row in levels
        ]
        axes.imshow(cells, aspect="auto", interpolation="nearest")
        axes.set_axis_off()

    return image(draw, alt, height=max(0.3, _ROW_INCHES * len(levels)), css_height=_ROW_PX * len(levels))
