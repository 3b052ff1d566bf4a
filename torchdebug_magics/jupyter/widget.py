"""The interactive view, made of core ipywidgets: tables can be filtered and sorted."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import ipywidgets

from torchdebug_magics.html import markup
from torchdebug_magics.html.page import Block, Facts, Fold, Page, Place, Table
from torchdebug_magics.html.style import el

_CODE = re.compile(r"`([^`\n]+)`")
_ROOM = 56_000
_AS_IS = "as reported"
_TABLE = "torchdebug-table"
_SORT = (  # as the controls above the table do: the kernel sorts all rows, not those that are shown
    f"const box = this.closest('.{_TABLE}'), column = box.querySelector('select'), at = [...this.parentNode.children].indexOf(this) + 1;"
    "if (column.selectedIndex === at) box.querySelector('input[type=checkbox]').click();"
    "else { column.selectedIndex = at; column.dispatchEvent(new Event('change', {bubbles: true})); }"
)
_COPY = "navigator.clipboard.writeText(this.dataset.fix); this.textContent = 'copied'"
_HEADS = {"onclick": _SORT, "title": "sort by this column; once more: the other way round"}


def view(page: Page) -> ipywidgets.Widget:
    """The widget for a page, block by block."""
    head = ipywidgets.HTML(markup.render(replace(page, blocks=())))
    fix = next((text for block in page.blocks if isinstance(block, Facts) for name, text in block.rows if name == "fix" and text), "")
    code = "\n".join(_CODE.findall(fix)) or fix  # a fix in words, whole
    copying = [ipywidgets.HTML(str(el("button", "copy the fix", onclick=_COPY, **{"data-fix": code})))] if fix else []
    return ipywidgets.VBox([head, *copying, *_parts(page.blocks)])


def _parts(blocks: Sequence[Block]) -> Iterator[ipywidgets.Widget]:
    """A widget for each block with controls, and one for the blocks between two of them."""
    for interactive, group in groupby(blocks, _is_interactive):
        if not interactive:
            yield ipywidgets.HTML(markup.render_blocks(tuple(group)))
            continue
        for block in group:
            if isinstance(block, Fold):
                fold = ipywidgets.Accordion([ipywidgets.VBox(list(_parts(block.blocks)))], selected_index=None)
                fold.set_title(0, block.title)
                yield fold
            elif isinstance(block, Table):
                yield TableView(block).box


def _is_interactive(block: Block) -> bool:
    if isinstance(block, Fold):
        return any(map(_is_interactive, block.blocks))
    return isinstance(block, Table) and bool(block.rows) and not block.is_sequence


class TableView:
    """A table with a filter and a sort column; a tree can be expanded and collapsed."""

    def __init__(self, table: Table) -> None:
        self._table = table.whole or table
        self.filter = ipywidgets.Text(placeholder="filter rows", continuous_update=True)
        self.column = ipywidgets.Dropdown(options=[_AS_IS, *self._table.columns], description="sort by")
        self.descending = ipywidgets.Checkbox(value=True, description="largest first", indent=False)
        self.open = ipywidgets.Button(description="expand all")
        self.close = ipywidgets.Button(description="collapse all")
        self.html = ipywidgets.HTML()
        buttons = [self.open, self.close] if self._table.tree else []
        row = ipywidgets.Layout(flex_flow="row wrap")
        self.box = ipywidgets.VBox([ipywidgets.HBox([self.filter, self.column, self.descending, *buttons], layout=row), self.html])
        self.box.add_class(_TABLE)
        for control in (self.filter, self.column, self.descending):
            control.observe(self._draw, "value")
        self.open.on_click(lambda _: self._draw(opened=range(len(self._table.rows))))
        self.close.on_click(lambda _: self._draw(opened=()))
        self._draw()

    def _draw(self, _: Any = None, *, opened: Collection[int] | None = None) -> None:
        column = None if self.column.value == _AS_IS else self._table.columns.index(self.column.value)
        shown = arranged(self._table, needle=self.filter.value, column=column, descending=self.descending.value)
        if not shown.rows:
            self.html.value = "no row matches the filter"
        elif shown.tree:
            everything = range(len(shown.rows)) if self.filter.value and opened is None else opened
            self.html.value = str(markup.tree(shown, opened=everything, head=_HEADS))
        else:
            self.html.value = str(markup.table(shown, _ROOM, _HEADS))


def arranged(table: Table, *, needle: str = "", column: int | None = None, descending: bool = True) -> Table:
    """The rows that contain `needle` in any cell, sorted by a column; marks move with their rows.

    A tree keeps what its rows stand in; sorted it is a list, in which each row has its full name.
    """
    kept = [at for at in range(len(table.rows)) if needle.casefold() in " ".join(table.text(at)).casefold()]
    if column is not None:
        known = [at for at in kept if _known(table.rows[at][column])]
        rest = [at for at in kept if not _known(table.rows[at][column])]  # what was not measured goes last, whatever the direction
        kept = sorted(known, key=lambda at: _key(table.rows[at][column]), reverse=descending) + rest
    elif table.tree:
        kept = table.with_those_around({*kept})
    marked = frozenset(new for new, old in enumerate(kept) if old in table.marked)
    tree = tuple(table.tree[at] if column is None else Place(0, str(table.rows[at][0])) for at in kept) if table.tree else ()
    return replace(table, rows=tuple(table.rows[at] for at in kept), marked=marked, tree=tree)


def _known(cell: object) -> bool:
    return cell is not None and not (isinstance(cell, float) and math.isnan(cell))


def _key(cell: Any) -> tuple[bool, Any]:
    return isinstance(cell, str), cell
