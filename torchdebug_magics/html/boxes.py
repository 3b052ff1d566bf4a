"""Boxes from top to bottom: each with its status in a symbol and a word, an arrow to the next one, or what stops the way to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, prose

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Box, Boxes

__all__ = ["boxes", "leads_on"]


def boxes(block: Boxes) -> Markup:
    """A list, so that it is read in its order."""
    parts: list[Markup] = []
    for number, box in enumerate(block.boxes):
        parts += [_box(box), *map(_stop, box.stops)]
        if leads_on(block, number):
            parts.append(el("div", "↓", style=style.ARROW))
        elif not box.stops:
            parts.append(el("div", style=style.GAP))
    title = el("div", el("b", prose(block.title, code_style=style.INLINE_CODE)))
    return el("div", title, *parts, style=style.BLOCK)


def leads_on(block: Boxes, number: int) -> bool:
    """Whether an arrow goes from a box to the next one; a bad one leads nowhere."""
    box = block.boxes[number]
    return number + 1 < len(block.boxes) and not box.stops and box.status != "bad"


def _box(box: Box) -> Markup:
    look = style.STATUS[box.status]
    return el(
        "div",
        el("span", f"{look.symbol} ", style=style.BOX_SYMBOL),
        el("b", box.name, style=style.BOX_NAME),
        el("div", prose(box.text, code_style=style.INLINE_CODE), style=style.BOX_TEXT),
        style=style.BOX.format(solid=look.solid, tint=look.tint),
    )


def _stop(text: str) -> Markup:
    return el("div", "✂ ", prose(text, code_style=style.INLINE_CODE), style=style.STOP)
