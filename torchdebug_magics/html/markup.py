"""A page as HTML that is still whole in an untrusted notebook: semantic elements, inline literal styles, every user string escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.html import style
from torchdebug_magics.html.heatmap import heatmap
from torchdebug_magics.html.page import Areas, Bars, Boxes, Chart, Code, Facts, Fold, Heatmap, Meters, Note, Page, Table, Verbatim
from torchdebug_magics.html.pictures import areas, chart
from torchdebug_magics.html.style import Markup, el, prose
from torchdebug_magics.html.table import bars, boxes, meters, table

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block


_ROOM = 60_000
"""Bytes that the tables of one page may take, so that an output with a chart stays below 100 KB."""
_LEAST = 6_000
"""For a short table that comes after a long one."""


def render(page: Page, *, is_beside_widget: bool = False) -> str:
    """The headline as a card, then the blocks; beside a widget of the same page, seen only where that widget cannot be."""
    parts = _headline(page), *_Writer().blocks(page.blocks)
    if is_beside_widget:
        return str(el("div", el("style", Markup(style.BESIDE_WIDGET)), *parts, style=style.PAGE, **{"class": style.FROZEN}))
    return str(el("div", *parts, style=style.PAGE))


def render_blocks(blocks: tuple[Block, ...]) -> str:
    """Some blocks of a page, for a view that sets others between them."""
    return str(el("div", *_Writer().blocks(blocks), style=style.PAGE))


def _headline(page: Page) -> Markup:
    look = style.STATUS[page.status]
    return el(
        "div",
        el("span", f"{look.symbol} {look.word}", style=style.BADGE.format(solid=look.solid)),
        el("span", page.instrument, style=style.NAME),
        el("div", _prose(page.headline), style=style.VERDICT),
        style=style.CARD.format(solid=look.solid, tint=look.tint),
    )


class _Writer:
    """Writes the blocks of one page; its tables share the room there is."""

    def __init__(self) -> None:
        self._room = _ROOM

    def blocks(self, blocks: tuple[Block, ...]) -> list[Markup]:
        return [self._block(block) for block in blocks]

    def _block(self, block: Block) -> Markup:  # noqa: C901, PLR0911 - one for each kind
        match block:
            case Table():
                return self._counted(table(block, max(self._room, _LEAST)) if block.rows else Markup())
            case Fold():
                return el("details", el("summary", _prose(block.title), style=style.SUMMARY), *self.blocks(block.blocks), style=style.FOLD)
            case Facts():
                return _facts(block)
            case Code():
                return _code(block)
            case Chart():
                return chart(block)
            case Areas():
                return areas(block)
            case Bars():
                return self._counted(bars(block))
            case Boxes():
                return self._counted(boxes(block))
            case Heatmap():
                return self._counted(heatmap(block))
            case Meters():
                return meters(block)
            case Note():
                return _note(block)
            case Verbatim():
                return el("pre", block.text, style=style.VERBATIM)

    def _counted(self, written: Markup) -> Markup:
        self._room -= len(written.encode())
        return written


def _facts(block: Facts) -> Markup:
    rows = [
        el("tr", el("th", name, scope="row", style=style.FACT_NAME), el("td", _prose(value), style=style.FACT), style=style.FACT_ROW)
        for name, value in block.rows
    ]
    title = el("caption", _prose(block.title), style=style.CAPTION) if block.title else ""
    return el("div", el("table", title, el("tbody", *rows), style=style.FACTS), style=style.BLOCK)


def _code(block: Code) -> Markup:
    width = max((len(str(number)) for number, _ in block.lines), default=1)
    lines = [
        el("span", f"→ {number:>{width}} │ ", *_underlined(text, block.underlined), style=style.CODE_LINE)
        if number == block.marked
        else f"  {number:>{width}} │ {text}"
        for number, text in block.lines
    ]
    listing = [part for line in lines for part in (line, "\n")][:-1]
    title = el("div", el("b", block.title)) if block.title else ""
    return el("div", title, el("pre", *listing, style=style.CODE), style=style.BLOCK)


def _underlined(text: str, span: tuple[int, int] | None) -> tuple[Markup | str, ...]:
    if span is None:
        return (text,)
    first, end = span
    return (text[:first], el("u", text[first:end], style=style.UNDERLINED), text[end:])


def _note(block: Note) -> Markup:
    look = style.STATUS[block.status]
    said = el("b", f"{look.symbol} {look.word}: ")
    return el("p", said, _prose(block.text), style=style.NOTE.format(solid=look.solid))


def _prose(text: str) -> Markup:
    return prose(text, code_style=style.INLINE_CODE)
