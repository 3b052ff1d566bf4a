"""Quantities on top of each other over time: an image, with its words and the key to its colours in HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.format import cell
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el
from torchdebug_magics.html.picture import Words, picture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

    from torchdebug_magics.html.page import Areas

__all__ = ["areas", "describe", "totals"]

_HEIGHT = 2.4
_STRIP = 0.06
"""How high the strip is that says what went on, as a share of the height."""


def areas(block: Areas) -> Markup:
    """The image between its words; where it cannot be drawn, the words."""
    alt = describe(block)
    bottom = cell(block.bottom, block.format) if block.bottom else "0"
    words = Words(block.title, top=cell(_top(block), block.format), bottom=bottom, below=block.x_label, key=tuple(_key(block)))
    return picture(lambda axes: _draw(axes, block), words, alt=alt, height=_HEIGHT, otherwise=f"{block.title}: {alt}")


def describe(block: Areas) -> str:
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


def _cumulated(block: Areas) -> Iterator[list[float]]:
    """The upper edge of each quantity on top of those before it."""
    upper = [0.0] * len(block.series[0][1])
    for _, values in block.series:
        upper = [below + value for below, value in zip(upper, values, strict=True)]
        yield upper


def _strip_colours(block: Areas) -> dict[str, str]:
    named = list(dict.fromkeys(name for name, _ in block.stretches))
    return dict(zip(named, style.colours(named, style.PHASES, style.STRIPES), strict=True))


def _draw(axes: Axes, block: Areas) -> None:
    count = len(block.series[0][1])
    edges = range(count)
    most, low = _top(block) or 1.0, block.bottom
    high = (most - low) or 1.0
    axes.set_xlim(0, max(1, count - 1))
    axes.set_ylim(low - _STRIP * 1.5 * high, low + high * 1.04)
    lower = [low] * count
    for colour, total in zip(_area_colours(block), _cumulated(block), strict=True):
        upper = [max(low, value) for value in total]
        axes.fill_between(edges, lower, upper, color=colour, step="post", linewidth=0)
        lower = upper
    strip = _strip_colours(block)
    for (name, first), (_, end) in zip(block.stretches, [*block.stretches[1:], ("", count)], strict=False):
        axes.barh(low - _STRIP * high, max(end - first, 1), left=first, height=_STRIP * high, color=strip[name], linewidth=0)
    for number, (_, point) in enumerate(block.marks, 1):
        axes.axvline(point, color=style.CHART_FRAME, linewidth=1.0, linestyle=":")
        axes.text(point, most, f" {number}", color=style.CHART_FRAME, fontsize=8, va="top")
    axes.axvline(block.marked, color=style.CHART_BAD, linewidth=1.2, linestyle="--")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(style.CHART_FRAME)
