"""A matplotlib drawing as an `<img>`: transparent, in colours that show on any background, without a word in it."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["image"]

_WIDTH, _DPI = 7.2, 160
_CSS_WIDTH = 720
_COLOURS = 32
"""In the palette of the image, which is then four times smaller."""


def image(draw: Callable[[Axes], None], alt: str, *, height: float, css_height: int | None = None) -> Markup:
    """What `draw` puts on axes that fill the picture, `height` inches of 7.2 high; shown so many pixels high, or in proportion."""
    data = base64.b64encode(_png(draw, height)).decode("ascii")
    return el(
        "img",
        src=f"data:image/png;base64,{data}",
        alt=alt,
        width=_CSS_WIDTH,
        style=style.IMAGE if css_height is None else style.IMAGE_OF_ROWS.format(height=css_height),
    )


def _png(draw: Callable[[Axes], None], height: float) -> bytes:
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
    target = io.BytesIO()
    picture = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()), "raw", "RGBA", 0, 1)
    picture.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE).save(target, format="png", optimize=True)
    return target.getvalue()
