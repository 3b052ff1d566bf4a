"""A tree that opens and closes in the page itself, for a live view alone: it has a style sheet, which an untrusted notebook drops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdebug_magics.html import style
from torchdebug_magics.html.elements import Markup, el, join, prose
from torchdebug_magics.html.table import NO_ATTRIBUTES, OPEN_ROWS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torchdebug_magics.html.page import Table

__all__ = ["tree"]

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


def tree(block: Table, *, opened: Collection[int] | None = None, head: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    """Each row with others in it can be opened; `opened` says which are, else as many levels as fit on a page.

    Each heading has the attributes `head`.
    """
    if opened is None:
        shown = {*block.seen_first(OPEN_ROWS)}
        opened = {at for at in shown if at + 1 in shown}
    widths = _widths(block)
    heads = el("div", *(_cell(block, column, column, head) for column in block.columns), **{"class": "row head"})
    left_out = max(0, len(block.rows) - _MOST)
    more = el("p", f"{left_out:,} more: filter to see them") if left_out else ""
    columns = f"--columns:{' '.join(f'{width:.1f}ch' for width in widths)}"
    body = el("div", heads, _nested(block, opened), more, **{"class": "torchdebug-tree", "style": columns})
    caption = el("div", prose(block.caption, code_style=style.INLINE_CODE), style=style.CAPTION)
    return el("div", el("style", Markup(_STYLE)), caption, body)


def _nested(block: Table, opened: Collection[int]) -> Markup:
    """One pass from the last row to the first: what stands in a row is written before it."""
    waiting: list[tuple[int, Markup]] = []  # (depth, what is written), the nearest last
    for at in range(min(len(block.rows), _MOST) - 1, -1, -1):
        depth = block.tree[at].depth
        inside: list[Markup] = []
        while waiting and waiting[-1][0] > depth:
            inside.append(waiting.pop()[1])
        waiting.append((depth, _row(block, at, join(list(inside)), at in opened)))
    return join([written for _, written in reversed(waiting)])


def _row(block: Table, at: int, inside: Markup, is_open: bool) -> Markup:
    texts = block.text(at)
    name = el("b", f"{block.label(at)} ✖" if at in block.marked else block.label(at), title=texts[0])
    cells = [_cell(block, column, text) for column, text in zip(block.columns[1:], texts[1:], strict=True)]
    look = {"class": "row bad" if at in block.marked else "row"}
    if not inside:
        return el("div", name, *cells, **look)
    return el("details", el("summary", name, *cells, **look), inside, **({"open": "open"} if is_open else {}))


def _cell(block: Table, column: str, text: str, more: Mapping[str, str] = NO_ATTRIBUTES) -> Markup:
    if column == block.columns[0]:
        return el("b", text, **more)
    return el("i", text, **({} if block.is_text(column) else {"class": "n"}), **more)


def _widths(block: Table) -> list[float]:
    """In characters, so that nothing is cut off and every row has the same."""
    positions = range(min(len(block.rows), _MOST))
    texts = [block.columns, *(block.text(at) for at in positions)]
    first = max([len(block.columns[0]), *(len(block.label(at)) for at in positions)]) + 4
    return [first * _NAME_CH, *(max(len(row[column]) for row in texts) * _CELL_CH + 1 for column in range(1, len(block.columns)))]
