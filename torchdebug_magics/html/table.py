"""A table as HTML: the first rows open, more in a fold, and an honest count of what was left out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchdebug_magics.format import plural
from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, join, prose

if TYPE_CHECKING:
    from torchdebug_magics.format import Format
    from torchdebug_magics.html.page import Table

__all__ = ["NO_ATTRIBUTES", "OPEN_ROWS", "table"]

OPEN_ROWS = 50
NO_ATTRIBUTES: Mapping[str, str] = {}
_STEP = "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}"
_SEAM = re.compile(r"(?<=, )|(?<=[A-Za-z_]{2} )(?=\d)")
"""After a comma, and between a name and its shape."""
_NARROW_SEAM = re.compile(r"(?<=, )|(?<= )(?=x \d)|(?<=[A-Za-z]{2} )(?=\d)|(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=\w_)(?=\w)")
"""Also within a shape, and within a name: a line breaks there only where the page is too narrow for the table."""
_LOOKS: Mapping[Format, str] = {"text": style.TEXT, "prose": style.PROSE, "code": style.CODE_CELL}


def table(block: Table, room: int, head: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    """The whole table in at most about `room` bytes; marked rows come first where they would be folded away.

    Of a tree that is long, the upper levels are open; what is inside follows in the fold, each row under its full name. Each heading has
    the attributes `head`.
    """
    order, opened = _order(block)
    closed = _closed(block, order[:opened])
    rows: list[Markup] = []
    for number, position in enumerate(order):
        in_tree = block.tree and number < opened
        name = block.label(position, step=_STEP, closed=position in closed) if in_tree else block.text(position)[0]
        row = _row(block, position, name)
        room -= len(row.encode())
        if room < 0 and rows:
            break
        rows.append(row)
    left_out = len(block.rows) - len(rows)
    return join(
        [
            _framed(block, block.caption, rows[:opened], head),
            _fold(block, rows[opened:]),
            el("p", f"{left_out:,} more, see the report", style=style.BLOCK) if left_out else "",
        ]
    )


def _order(block: Table) -> tuple[list[int], int]:
    """The positions as they are shown, and how many of them are open."""
    if not block.tree:
        return block.order(OPEN_ROWS), OPEN_ROWS
    seen = block.seen_first(OPEN_ROWS)
    first = {*seen[:OPEN_ROWS], *(at for at in seen if at in block.marked)}
    rest = [at for at in range(len(block.rows)) if at not in first]
    return [*sorted(first), *rest], len(first)


def _closed(block: Table, shown: Sequence[int]) -> set[int]:
    """Those of a tree after which what they hold is not shown."""
    known = {*shown}
    return {at for at in shown if block.tree and at + 1 not in known}


def _fold(block: Table, rows: Sequence[Markup]) -> Markup:
    if not rows:
        return Markup()
    return el(
        "details",
        el("summary", plural(len(rows), "further row"), style=style.SUMMARY),
        _framed(block, f"{block.caption} (continued)", rows),
        style=style.FOLD,
    )


def _framed(block: Table, caption: str, rows: Sequence[Markup], head: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    looks = [style.HEAD.format(side=_side(block, column)) for column in block.columns]
    heads = [el("th", *_broken(column), scope="col", style=look, **head) for column, look in zip(block.columns, looks, strict=True)]
    whole = el(
        "table",
        el("caption", prose(caption, code_style=style.INLINE_CODE), style=style.CAPTION),
        el("thead", el("tr", *heads)),
        el("tbody", *rows),
        style=style.TABLE,
        cellpadding=4,
    )
    return el("div", whole, style=style.BLOCK)


def _row(block: Table, position: int, name: str) -> Markup:
    cells = block.text(position)[1:]
    marked = position in block.marked
    return el(
        "tr",
        el("th", _path(f"{name} ✖" if marked else name), scope="row", style=style.ROW_NAME),
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
    shown = prose(text, code_style=style.INLINE_CODE) if how == "prose" else _listed(text, _NARROW_SEAM if how == "text" else _SEAM)
    return el("td", shown, style=_LOOKS.get(how, style.NUMBER if " " in text else ""))


def _listed(text: str, seam: re.Pattern[str]) -> Markup:
    """Text that may break into a new line at a seam, and nowhere else."""
    return _joined(seam.split(text))


def _path(name: str) -> Markup:
    """May go on in a new line after a dot."""
    return _joined(re.split(r"(?<=\.)(?=\w)", name))


def _joined(parts: Sequence[str]) -> Markup:
    first, *more = parts
    return join([first, *(piece for part in more for piece in (el("wbr"), part))])


def _side(block: Table, column: str) -> str:
    return "left" if column == block.columns[0] or block.is_text(column) else "right"
