"""A table as HTML: the first rows open, more in a fold, and an honest count of what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.format import plural
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, join, prose

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Table

__all__ = ["OPEN_ROWS", "table"]

OPEN_ROWS = 50
_LOOKS: Mapping[Format, str] = {"text": style.TEXT, "prose": style.PROSE, "code": style.CODE_CELL}


def table(block: Table, room: int) -> Markup:
    """The whole table in at most about `room` bytes; marked rows come first where they would be folded away."""
    rows: list[Markup] = []
    for position in block.order(OPEN_ROWS):
        row = _row(block, position)
        room -= len(row.encode())
        if room < 0 and rows:
            break
        rows.append(row)
    left_out = len(block.rows) - len(rows)
    return join(
        [
            _framed(block, block.caption, rows[:OPEN_ROWS]),
            _fold(block, rows[OPEN_ROWS:]),
            el("p", f"{left_out:,} more, see the report", style=style.BLOCK) if left_out else "",
        ]
    )


def _fold(block: Table, rows: Sequence[Markup]) -> Markup:
    if not rows:
        return Markup()
    return el(
        "details",
        el("summary", plural(len(rows), "further row"), style=style.SUMMARY),
        _framed(block, f"{block.caption} (continued)", rows),
        style=style.FOLD,
    )


def _framed(block: Table, caption: str, rows: Sequence[Markup]) -> Markup:
    head = [el("th", *_broken(column), scope="col", style=style.HEAD.format(side=_side(block, column))) for column in block.columns]
    whole = el(
        "table",
        el("caption", prose(caption, code_style=style.INLINE_CODE), style=style.CAPTION),
        el("thead", el("tr", *head)),
        el("tbody", *rows),
        style=style.TABLE,
        cellpadding=4,
    )
    return el("div", whole, style=style.BLOCK)


def _row(block: Table, position: int) -> Markup:
    name, *cells = block.text(position)
    marked = position in block.marked
    return el(
        "tr",
        el("th", f"{name} ✖" if marked else name, scope="row", style=style.ROW_NAME),
        *(_cell(block, column, text) for column, text in zip(block.columns[1:], cells, strict=True)),
        align="right",
        style=style.MARKED if marked else "",
    )


def _broken(heading: str) -> list[str]:
    """On two lines, so that a column of short numbers stays narrow."""
    *first, last = heading.rsplit(" ", 1)
    return [*first, el("br"), last] if first else [last]


def _cell(block: Table, column: str, text: str) -> Markup:
    how = block.format(column)
    shown = prose(text, code_style=style.INLINE_CODE) if how == "prose" else text
    return el("td", shown, style=_LOOKS.get(how, ""))


def _side(block: Table, column: str) -> str:
    return "left" if column == block.columns[0] or block.is_text(column) else "right"
