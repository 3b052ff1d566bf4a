"""A chart as a PNG with alt text: drawn on a white card of its own, so that it reads on any theme, and without pyplot."""

from __future__ import annotations

import base64
import io
import math
import warnings
from typing import TYPE_CHECKING

from torchdebug_magics.format import number, plural, sparkline
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchdebug_magics.html.page import Chart

__all__ = ["chart", "describe"]

_WIDTH, _HEIGHT, _PAD, _DPI = 7.2, 2.3, 0.1, 160
_CSS_WIDTH = 720
_TOP = 0.92
"""How high the mark of a non-finite value stands, as a share of the height."""
_LINE, _BAD, _INK, _GRID = "#2457a6", "#b3261e", "#333333", "#dddddd"


def chart(block: Chart) -> Markup:
    """An image; where it cannot be drawn, bars of text."""
    alt = describe(block)
    try:
        data = base64.b64encode(_png(block)).decode("ascii")
    except Exception:  # noqa: BLE001 - a picture that fails never costs the reader the verdict
        return el("p", f"{block.title}: {sparkline(block.values)} {alt}", style=style.BLOCK)
    return el("div", el("img", src=f"data:image/png;base64,{data}", alt=alt, width=_CSS_WIDTH, style=style.IMAGE), style=style.BLOCK)


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


def _png(block: Chart) -> bytes:
    import matplotlib.style  # noqa: PLC0415 - half a second, and only where there is something to draw
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415 - matplotlib's own way to write a PNG

    with warnings.catch_warnings(), matplotlib.style.context("default"):  # what the user has set does not show here, and is put back
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=_PAD, h_pad=_PAD)
        canvas = FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), block)
        canvas.draw()
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette())
    target = io.BytesIO()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()), "raw", "RGBA", 0, 1)
    image.convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE).save(target, format="png", optimize=True)
    return target.getvalue()


def _palette() -> list[int]:
    """White, and each of our colours in four strengths on it: the image is four times smaller, and its colours are exact."""
    colours = [tuple(bytes.fromhex(colour[1:])) for colour in (_LINE, _BAD, _INK, _GRID)]
    return [255, 255, 255, *(round(255 + (part - 255) * level / 4) for colour in colours for level in (1, 2, 3, 4) for part in colour)]


def _draw(axes: Axes, block: Chart) -> None:
    steps = range(block.first_x, block.first_x + len(block.values))
    drawn = [value if math.isfinite(value) and (value > 0 or not block.log) else math.nan for value in block.values]
    axes.plot(steps, drawn, color=_LINE, linewidth=1.6, marker="o", markersize=2.5 if len(drawn) <= _CSS_WIDTH // 4 else 0)
    if all(math.isnan(value) for value in drawn):
        axes.set_yticks([])
    elif block.log:
        _logarithmic(axes)
    lost = [step for step, value in zip(steps, block.values, strict=True) if not math.isfinite(value)]
    across = axes.get_xaxis_transform()
    axes.vlines(lost, 0, 1, color=_BAD, linewidth=1.0, linestyle="--", transform=across)
    axes.plot(lost, [_TOP] * len(lost), "x", color=_BAD, markersize=7, markeredgewidth=2, transform=across)
    _dress(axes, block)


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    within_two_decades = high < 100 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if within_two_decades else (1.0,), numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _dress(axes: Axes, block: Chart) -> None:
    title = block.title if all(map(math.isfinite, block.values)) else f"{block.title} (red cross: not finite)"
    axes.set_title(title, loc="left", fontsize=10, color=_INK, fontweight="bold", parse_math=False)
    axes.set_xlabel(block.x_label, fontsize=9, color=_INK, parse_math=False)
    axes.set_ylabel(block.y_label, fontsize=9, color=_INK, parse_math=False)
    axes.tick_params(labelsize=8, color=_INK, labelcolor=_INK)
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, color=_GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
