"""A chart: the line is a transparent PNG in colours that show on any background, its words are HTML in the theme's own colour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, sparkline
from torchdebug_magics.html import style
from torchdebug_magics.html.picture import Words, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchdebug_magics.html.elements import Markup
    from torchdebug_magics.html.page import Chart

__all__ = ["chart", "describe"]

_HEIGHT = 1.6
_MANY = 180
"""Values from which their dots would touch."""
_MARGIN = 0.08
"""Above the largest and below the smallest value, as a share of the height between them."""
_LOST = 0.9
"""How high the mark of a non-finite value stands, as a share of the height."""


def chart(block: Chart) -> Markup:
    """An image between its words; where it cannot be drawn, bars of text."""
    alt = describe(block)
    otherwise = f"{block.title}: {sparkline(block.values, span=block.span)} {alt}"
    return picture(lambda axes: _draw(axes, block), _words(block), alt=alt, height=_HEIGHT, otherwise=otherwise)


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


def _words(block: Chart) -> Words:
    """The ends of both axes are named: the largest and the smallest value, the first and the last step."""
    shown = [value for value in _drawn(block) if not math.isnan(value)]
    ends = block.span or ((min(shown), max(shown)) if shown else None)
    low, high = ("", "") if ends is None else (number(float(ends[0])), number(float(ends[1])))
    first, last = block.ends or (f"{block.first_x:,}", f"{block.first_x + len(block.values) - 1:,}")
    lost = next((step for step, value in enumerate(block.values, block.first_x) if not math.isfinite(value)), None)
    said = "" if lost is None else f" (red cross: not finite, first at {lost:,})"
    return Words(f"{block.title}{said}", top=high, bottom=low if low != high else "", below=(first, block.x_label, last))


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


def _with_margin(span: tuple[float, float], *, log: bool) -> tuple[float, float]:
    """A little more at both ends, so that a line along one of them is seen whole."""
    low, high = span
    if log and low > 0:
        factor = (high / low) ** _MARGIN if high > low else 1 + _MARGIN
        return low / factor, high * factor
    more = _MARGIN * ((high - low) or 1.0)
    return low - more, high + more


def _dress(axes: Axes, block: Chart, shown: list[float]) -> None:
    """No words here: a frame, and a line at each end of the scale, whose values stand beside the image."""
    axes.set_xmargin(0.02)
    axes.set_ymargin(_MARGIN)
    if block.log and shown:
        axes.set_yscale("log")
    if block.span is not None:
        axes.set_ylim(*_with_margin(block.span, log=block.log))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_yticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(style.CHART_FRAME)
    if shown:
        axes.hlines(
            (min(shown), max(shown)), 0, 1, color=style.CHART_FRAME, linewidth=0.5, linestyle=":", transform=axes.get_yaxis_transform()
        )
