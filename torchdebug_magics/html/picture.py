"""An image between its words: its caption, the ends of its axes and the key to its colours are HTML, in the theme's own colour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, prose
from torchdebug_magics.html.image import image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Words", "picture"]


@dataclass(frozen=True)
class Words:
    """What stands around an image."""

    caption: str
    top: str
    """At the upper end of the scale, on the left."""
    bottom: str
    below: str | tuple[str, str, str]
    """In the middle; or at the left, in the middle and at the right."""
    key: tuple[Markup, ...] = ()


def picture(draw: Callable[[Axes], None], words: Words, *, alt: str, height: float, otherwise: str) -> Markup:
    """What `draw` puts on axes, `height` inches high; the sentence `otherwise` where it cannot be drawn."""
    try:
        drawn = image(draw, alt, height=height)
    except Exception:  # noqa: BLE001 - a picture that fails never costs the reader the verdict
        return el("p", otherwise, style=style.BLOCK)
    below = (
        [_word(words.below, "center", "top")]
        if isinstance(words.below, str)
        else [_word(text, side, "top") for text, side in zip(words.below, ("left", "center", "right"), strict=True)]
    )
    corner = _word("", "left", "top")
    rows = [
        [_word(words.top, "right", "top"), _image_cell(drawn, len(below))],
        [_word(words.bottom, "right", "bottom")],
        [corner, *below],
    ]
    whole = el(
        "table",
        el("caption", prose(words.caption, code_style=style.INLINE_CODE), style=style.CAPTION),
        el("tbody", *(el("tr", *cells, style=style.CHART_ROW) for cells in rows)),
        style=style.FACTS,
    )
    # Below the table: within it, a long key would widen the column of the image, and part the image from its scale.
    key = el("div", *words.key, style=style.KEY) if words.key else ""
    return el("div", whole, key, style=style.BLOCK)


def _word(text: str, side: str, edge: str) -> Markup:
    return el("td", text, style=style.CHART_WORD.format(side=side, edge=edge))


def _image_cell(drawn: Markup, wide: int) -> Markup:
    """As high as both ends of the scale, and as wide as all that stands below it."""
    return el("td", drawn, rowspan=2, colspan=wide if wide > 1 else "", style=style.CHART_IMAGE)
