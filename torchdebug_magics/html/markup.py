"""A page as HTML that is still whole in an untrusted notebook: semantic elements, inline literal styles, every user string escaped.

Of a table, the first rows are open, more are in a fold, and what is left out is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torchdebug_magics.format import Format, byte_size, cell, plural, share
from torchdebug_magics.html import style
from torchdebug_magics.html.page import (
    Areas,
    Bars,
    Block,
    Boxes,
    Chart,
    Code,
    Facts,
    Fold,
    Heatmap,
    Measure,
    Meters,
    Note,
    Page,
    Table,
    Verbatim,
)  # fmt: skip
from torchdebug_magics.html.pictures import areas, chart, dot, heatmap
from torchdebug_magics.html.style import Markup, el, framed, join, prose
from torchdebug_magics.report import Gauge

_ROOM = 60_000
"""Bytes that the tables of one page may take, so that an output with a chart stays below 100 KB."""
_LEAST = 6_000
"""For a short table that comes after a long one."""
OPEN_ROWS = 50
NO_ATTRIBUTES: Mapping[str, str] = {}
_STEP = "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}"
_SEAM = re.compile(r"(?<=, )|(?<=[A-Za-z_]{2} )(?=\d)")
"""After a comma, and between a name and its shape."""
_NARROW_SEAM = re.compile(r"(?<=, )|(?<= )(?=x \d)|(?<=[A-Za-z]{2} )(?=\d)|(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=\w_)(?=\w)")
"""Also within a shape, and within a name: a line breaks there only where the page is too narrow for the table."""
_DOT = re.compile(r"(?<=\.)(?=\w)")
_LOOKS: Mapping[Format, str] = {"text": style.TEXT, "prose": style.PROSE, "code": style.CODE_CELL}
_WIDTH, _HEIGHT = 140, 12
_HIGH, _FULL = 0.75, 0.9
"""Shares from which a browser draws the bar in its colours for caution and for danger."""
_MOST = 3000
"""Rows; a page with more is slow to scroll."""
_NAME_CH, _CELL_CH = 1.16, 1.04
"""Widths of a character, in those of the digit 0: of code, of the theme's text."""
# Written out, as what every row repeats would be ten times the rest.
_STYLE = f"""
.torchdebug-tree {{overflow:auto; max-height:640px; line-height:1.5}}
.torchdebug-tree .row {{display:grid; grid-template-columns:var(--columns); column-gap:1.2em}}
.torchdebug-tree .row {{width:max-content; min-width:100%; padding:1px 6px}}
.torchdebug-tree summary.row {{cursor:pointer; list-style:none}}
.torchdebug-tree summary.row::-webkit-details-marker {{display:none}}
.torchdebug-tree .row:hover, .torchdebug-tree summary.row:focus {{background:rgba(128,128,128,.14)}}
.torchdebug-tree .head {{border-bottom:1px solid rgba(128,128,128,.5)}}
.torchdebug-tree .bad {{{style.MARKED}}}
.torchdebug-tree b {{font-family:monospace; font-weight:normal; white-space:pre}}
.torchdebug-tree .head b {{font-family:inherit}}
.torchdebug-tree .head b, .torchdebug-tree .head i {{font-weight:bold}}
.torchdebug-tree .row > b::before {{content:"  "}}
.torchdebug-tree summary.row > b::before {{content:"▸ "}}
.torchdebug-tree details[open] > summary.row > b::before {{content:"▾ "}}
.torchdebug-tree i {{font-style:normal; white-space:nowrap}}
.torchdebug-tree i.n {{text-align:right}}
"""


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


def table(block: Table, room: int, head: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    """The whole table in at most about `room` bytes; marked rows come first where they would be folded away.

    Of a tree that is long, the upper levels are open; what is inside follows in the fold, each row under its full name. Each heading has
    the attributes `head`.
    """
    if not block.rows:
        return Markup()
    first = block.shown(OPEN_ROWS, OPEN_ROWS)
    known = {*first}
    rows: list[Markup] = []
    for position in (*first, *(at for at in range(len(block.rows)) if at not in known)):
        in_tree = block.tree and position in known
        name = block.label(position, step=_STEP, closed=position + 1 not in known) if in_tree else block.text(position)[0]
        row = _row(block, position, name)
        room -= len(row.encode())
        if room < 0 and rows:
            break
        rows.append(row)
    more, left_out = rows[len(first) :], len(block.rows) - len(rows)
    parts = [framed(block.caption, rows[: len(first)], _heads(block, head))]
    if more:
        summary = el("summary", plural(len(more), "further row"), style=style.SUMMARY)
        parts.append(el("details", summary, framed(f"{block.caption} (continued)", more, _heads(block, NO_ATTRIBUTES)), style=style.FOLD))
    if left_out:
        parts.append(el("p", f"{left_out:,} more, see the report", style=style.BLOCK))
    return join(parts)


def _heads(block: Table, attributes: Mapping[str, str]) -> list[Markup]:
    """A heading of several words on two lines, so that a column of short numbers stays narrow."""
    heads: list[Markup] = []
    for column in block.columns:
        side = "left" if column == block.columns[0] or block.is_text(column) else "right"
        *first, last = column.rsplit(" ", 1)
        words = [*first, el("br"), last] if first else [last]
        heads.append(el("th", *words, scope="col", style=style.HEAD.format(side=side), **attributes))
    return heads


def _row(block: Table, position: int, name: str) -> Markup:
    marked = position in block.marked
    cells: list[Markup] = []
    for column, text in zip(block.columns[1:], block.text(position)[1:], strict=True):
        how = block.format(column)
        shown = prose(text) if how == "prose" else _breakable(text, _NARROW_SEAM if how == "text" else _SEAM)
        cells.append(el("td", shown, style=_LOOKS.get(how, style.NUMBER if " " in text else "")))
    return el(
        "tr",
        el("th", _breakable(f"{name} ✖" if marked else name, _DOT), scope="row", style=style.ROW_NAME),
        *cells,
        align="right",
        style=style.MARKED if marked else "",
    )


def _breakable(text: str, seam: re.Pattern[str]) -> Markup:
    """Text that may break into a new line at a seam, and nowhere else."""
    first, *more = seam.split(text)
    return join([first, *(piece for part in more for piece in (el("wbr"), part))])


def bars(block: Bars) -> Markup:
    """One row a thing, two columns a quantity: the bar, and the number beside it."""
    rows: list[Markup] = []
    for at, label in enumerate(block.labels):
        source = dot(style.KINDS.get(label, style.CHART_LINE))
        pairs = (part for measure in block.measures for part in _pair(measure, at, source))
        rows.append(el("tr", el("th", label, scope="row", style=style.ROW_NAME), *pairs))
    look = style.HEAD.format(side="left")
    heads = [el("th", measure.name, scope="col", colspan=2, style=look) for measure in block.measures]
    return framed(block.title, rows, [el("th", "", scope="col", style=look), *heads])


def shares(measure: Measure) -> tuple[float, ...]:
    """Of the sum."""
    total = sum(measure.values)
    return tuple(value / total if total else 0.0 for value in measure.values)


def _pair(measure: Measure, at: int, source: str) -> tuple[Markup, Markup]:
    value, part = measure.values[at], shares(measure)[at]
    wide = max(1, round(_WIDTH * value / (max(measure.values) or 1))) if value else 0
    image = el("img", src=source, alt=share(part), width=wide, height=_HEIGHT, style=style.BAR.format(wide=wide)) if wide else ""
    said = f"{cell(value, measure.format)} · {share(part)}" if value else "-"
    return el("td", image, width=_WIDTH, style=style.BAR_CELL.format(wide=_WIDTH)), el("td", said, style=style.BAR_WORD)


def boxes(block: Boxes) -> Markup:
    """A list, so that it is read in its order."""
    parts = [el("div", el("b", prose(block.title)))]
    for number, box in enumerate(block.boxes):
        look = style.STATUS[box.status]
        parts.append(
            el(
                "div",
                el("span", f"{look.symbol} ", style=style.BOX_SYMBOL),
                el("b", box.name, style=style.BOX_NAME),
                el("div", prose(box.text), style=style.BOX_TEXT),
                style=style.BOX.format(solid=look.solid, tint=look.tint),
            )
        )
        parts += [el("div", "✂ ", prose(stop), style=style.STOP) for stop in box.stops]
        if leads_on(block, number):
            parts.append(el("div", "↓", style=style.ARROW))
        elif not box.stops:
            parts.append(el("div", style=style.GAP))
    return el("div", *parts, style=style.BLOCK)


def leads_on(block: Boxes, number: int) -> bool:
    """Whether an arrow goes from a box to the next one; a bad one leads nowhere."""
    box = block.boxes[number]
    return number + 1 < len(block.boxes) and not box.stops and box.status != "bad"


def meters(block: Meters) -> Markup:
    """One row a memory."""
    return framed(block.title, map(_meter_row, block.gauges))


def level(gauge: Gauge) -> str:
    """``3.2 GiB of 12.7 GiB (25%)``; empty where nothing can be told."""
    if gauge.limit_bytes is None:
        return byte_size(gauge.used_bytes) if gauge.used_bytes else ""
    ratio = gauge.used_bytes / gauge.limit_bytes if gauge.limit_bytes else 0.0
    return f"{byte_size(gauge.used_bytes)} of {byte_size(gauge.limit_bytes)} ({share(round(ratio, 2))})"


def details(gauge: Gauge) -> str:
    """What it is made of, and what there is to know."""
    parts = ", ".join(f"{name} {byte_size(size_bytes)}" for name, size_bytes in gauge.parts)
    return "; ".join(filter(None, (parts, gauge.note)))


def _meter_row(gauge: Gauge) -> Markup:
    said, more = level(gauge), details(gauge)
    words = [said] if said else []
    if more:
        words += [el("div", more, style=style.METER_MORE)] if said else [more]
    meter, limit = Markup(), gauge.limit_bytes
    if limit:
        ends: dict[str, str | int] = {"min": 0, "max": limit, "low": int(_HIGH * limit), "high": int(_FULL * limit)}
        meter = el("meter", said, **ends, optimum=0, value=min(gauge.used_bytes, limit), style=style.METER)
    return el(
        "tr",
        el("th", gauge.label, scope="row", style=style.FACT_NAME),
        el("td", meter, style=style.METER_CELL),
        el("td", *words, style=style.FACT),
        style=style.FACT_ROW,
    )


def tree(block: Table, *, opened: Collection[int] | None = None, head: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    """Each row with others in it can be opened; `opened` says which are, else as many levels as fit on a page.

    Each heading has the attributes `head`.
    """
    if opened is None:
        shown = {*block.shown(OPEN_ROWS, OPEN_ROWS)}
        opened = {at for at in shown if at + 1 in shown}
    widths = _widths(block)
    heads = el("div", *(_tree_cell(block, column, column, head) for column in block.columns), **{"class": "row head"})
    left_out = max(0, len(block.rows) - _MOST)
    more = el("p", f"{left_out:,} more: filter to see them") if left_out else ""
    columns = f"--columns:{' '.join(f'{width:.1f}ch' for width in widths)}"
    body = el("div", heads, _nested(block, opened), more, **{"class": "torchdebug-tree", "style": columns})
    caption = el("div", prose(block.caption), style=style.CAPTION)
    return el("div", el("style", Markup(_STYLE)), caption, body)


def _nested(block: Table, opened: Collection[int]) -> Markup:
    """One pass from the last row to the first: what stands in a row is written before it."""
    waiting: list[tuple[int, Markup]] = []  # (depth, what is written), the nearest last
    for at in range(min(len(block.rows), _MOST) - 1, -1, -1):
        depth = block.tree[at].depth
        inside: list[Markup] = []
        while waiting and waiting[-1][0] > depth:
            inside.append(waiting.pop()[1])
        waiting.append((depth, _tree_row(block, at, join(list(inside)), at in opened)))
    return join([written for _, written in reversed(waiting)])


def _tree_row(block: Table, at: int, inside: Markup, is_open: bool) -> Markup:
    texts = block.text(at)
    name = el("b", f"{block.label(at)} ✖" if at in block.marked else block.label(at), title=texts[0])
    cells = [_tree_cell(block, column, text) for column, text in zip(block.columns[1:], texts[1:], strict=True)]
    look = {"class": "row bad" if at in block.marked else "row"}
    if not inside:
        return el("div", name, *cells, **look)
    return el("details", el("summary", name, *cells, **look), inside, **({"open": "open"} if is_open else {}))


def _tree_cell(block: Table, column: str, text: str, more: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    if column == block.columns[0]:
        return el("b", text, **more)
    return el("i", text, **({} if block.is_text(column) else {"class": "n"}), **more)


def _widths(block: Table) -> list[float]:
    """In characters, so that nothing is cut off and every row has the same."""
    positions = range(min(len(block.rows), _MOST))
    texts = [block.columns, *(block.text(at) for at in positions)]
    first = max([len(block.columns[0]), *(len(block.label(at)) for at in positions)]) + 4
    return [first * _NAME_CH, *(max(len(row[column]) for row in texts) * _CELL_CH + 1 for column in range(1, len(block.columns)))]


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
