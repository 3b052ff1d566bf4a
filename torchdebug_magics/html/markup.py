"""A page as HTML that is still whole in an untrusted notebook: semantic elements, inline literal styles, every user string escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdebug_magics.html import style
from torchdebug_magics.html.page import Areas, Bars, Block, Boxes, Chart, Code, Facts, Fold, Heatmap, Meters, Note, Page, Table, Verbatim
from torchdebug_magics.html.pictures import areas, chart, heatmap
from torchdebug_magics.html.style import Markup, el, framed, prose
from torchdebug_magics.html.table import bars, boxes, meters, table

_ROOM = 60_000
"""Bytes that the tables of one page may take, so that an output with a chart stays below 100 KB."""
_LEAST = 6_000
"""For a short table that comes after a long one."""


def render(page: Page, *, is_beside_widget: bool = False) -> str:
    """The headline as a card, then the blocks; beside a widget of the same page, seen only where that widget cannot be."""
    look = style.STATUS[page.status]
    headline = el(
        "div",
        el("span", f"{look.symbol} {look.word}", style=style.BADGE.format(solid=look.solid)),
        el("span", page.instrument, style=style.NAME),
        el("div", prose(page.headline), style=style.VERDICT),
        style=style.CARD.format(solid=look.solid, tint=look.tint),
    )
    parts = headline, *_written(page.blocks)
    if is_beside_widget:
        return str(el("div", el("style", Markup(style.BESIDE_WIDGET)), *parts, style=style.PAGE, **{"class": style.FROZEN}))
    return str(el("div", *parts, style=style.PAGE))


def render_blocks(blocks: Sequence[Block]) -> str:
    """Some blocks of a page, for a view that sets others between them."""
    return str(el("div", *_written(blocks), style=style.PAGE))


def _written(blocks: Sequence[Block]) -> list[Markup]:
    """The blocks, whose tables share the room there is."""
    room = _ROOM

    def write(block: Block) -> Markup:
        nonlocal room
        if isinstance(block, Fold):
            return el("details", el("summary", prose(block.title), style=style.SUMMARY), *map(write, block.blocks), style=style.FOLD)
        written = table(block, max(room, _LEAST)) if isinstance(block, Table) else _WRITERS[type(block)](block)
        if isinstance(block, (Table, Bars, Boxes, Heatmap)):
            room -= len(written.encode())
        return written

    return list(map(write, blocks))


def _facts(block: Facts) -> Markup:
    rows = [
        el("tr", el("th", name, scope="row", style=style.FACT_NAME), el("td", prose(value), style=style.FACT), style=style.FACT_ROW)
        for name, value in block.rows
    ]
    return framed(block.title, rows)


def _code(block: Code) -> Markup:
    width = max((len(str(number)) for number, _ in block.lines), default=1)
    listing: list[Markup | str] = []
    for number, text in block.lines:
        first, end = block.underlined or (len(text), len(text))
        marked = [text[:first], el("u", text[first:end], style=style.UNDERLINED) if end > first else "", text[end:]]
        line = f"{number:>{width}} │ "
        listing += ["\n", el("span", f"→ {line}", *marked, style=style.CODE_LINE) if number == block.marked else f"  {line}{text}"]
    title = el("div", el("b", block.title)) if block.title else ""
    return el("div", title, el("pre", *listing[1:], style=style.CODE), style=style.BLOCK)


def _note(block: Note) -> Markup:
    look = style.STATUS[block.status]
    return el("p", el("b", f"{look.symbol} {look.word}: "), prose(block.text), style=style.NOTE.format(solid=look.solid))


_WRITERS: Mapping[type[Block], Callable[[Any], Markup]] = {
    Facts: _facts,
    Code: _code,
    Chart: chart,
    Areas: areas,
    Bars: bars,
    Boxes: boxes,
    Heatmap: heatmap,
    Meters: meters,
    Note: _note,
    Verbatim: lambda block: el("pre", block.text, style=style.VERBATIM),
}
"""Of each kind of block but those that depend on others."""
