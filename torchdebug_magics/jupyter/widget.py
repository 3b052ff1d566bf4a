"""The interactive view, from core ipywidgets alone: each table can be filtered and sorted, folds open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import ipywidgets

from torchdebug_magics.html import markup
from torchdebug_magics.html.page import Fold, Table
from torchdebug_magics.html.table import table as table_html

if TYPE_CHECKING:
    from torchdebug_magics.html.page import Block, Page

__all__ = ["TableView", "arranged", "view"]

_ROOM = 56_000
_AS_IS = "as reported"


def view(page: Page) -> ipywidgets.Widget:
    """The page, block for block."""
    head = ipywidgets.HTML(markup.render(replace(page, blocks=())))
    return ipywidgets.VBox([head, *_parts(page.blocks)])


def _parts(blocks: Sequence[Block]) -> Iterator[ipywidgets.Widget]:
    """A widget for each block that has controls in it, and one for the blocks between two such."""
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
    """One table with a filter box and a choice of the column to sort by."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.filter = ipywidgets.Text(placeholder="filter rows", continuous_update=True)
        self.column = ipywidgets.Dropdown(options=[_AS_IS, *table.columns], description="sort by")
        self.descending = ipywidgets.Checkbox(value=True, description="largest first", indent=False)
        self.html = ipywidgets.HTML()
        self.box = ipywidgets.VBox([ipywidgets.HBox([self.filter, self.column, self.descending]), self.html])
        for control in (self.filter, self.column, self.descending):
            control.observe(self._draw, "value")
        self._draw()

    def _draw(self, _: Any = None) -> None:
        column = None if self.column.value == _AS_IS else self._table.columns.index(self.column.value)
        shown = arranged(self._table, needle=self.filter.value, column=column, descending=self.descending.value)
        self.html.value = str(table_html(shown, _ROOM)) if shown.rows else "<p>no row matches the filter</p>"


def arranged(table: Table, *, needle: str = "", column: int | None = None, descending: bool = True) -> Table:
    """The rows that hold `needle` in any cell, in the order of a column; the marks go along."""
    kept = [at for at in range(len(table.rows)) if needle.casefold() in " ".join(table.text(at)).casefold()]
    if column is not None:
        known = [at for at in kept if _known(table.rows[at][column])]
        rest = [at for at in kept if not _known(table.rows[at][column])]  # what was not measured goes last, whatever the direction
        kept = sorted(known, key=lambda at: _key(table.rows[at][column]), reverse=descending) + rest
    marked = frozenset(new for new, old in enumerate(kept) if old in table.marked)
    return replace(table, rows=tuple(table.rows[at] for at in kept), marked=marked)


def _known(cell: object) -> bool:
    return cell is not None and not (isinstance(cell, float) and math.isnan(cell))


def _key(cell: Any) -> tuple[bool, Any]:
    return isinstance(cell, str), cell
