"""The contents of a view: a headline and blocks, as pure data. `markup` renders a page as HTML, `plain` as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from torchdebug_magics.format import Format, cell
from torchdebug_magics.report import Gauge
from torchdebug_magics.report import Status as ReportStatus

Status: TypeAlias = ReportStatus | Literal["busy"]
Cell: TypeAlias = str | int | float | None
_DOUBTS = frozenset({"fix", "to try", "but", "leak", "not compared", "not reached"})
"""Names of rows that no page has where nothing is wrong."""
_DEEPEST = 24
"""Deepest level of a tree that is indented further."""


@dataclass(frozen=True)
class Facts:
    """Named values, one per line: ``("fix", "add 1e-12 before the log")``."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Code:
    """An excerpt of the user's code with one line marked."""

    lines: tuple[tuple[int, str], ...]
    """Line number, as the user sees it, and text."""
    marked: int | None = None
    title: str = ""
    underlined: tuple[int, int] | None = None
    """The part of the marked line that is at fault, as positions of characters: the first, and the one after the last."""


@dataclass(frozen=True)
class Verbatim:
    """Text whose line breaks count, such as a traceback."""

    text: str


class Place(NamedTuple):
    """A row's position in a tree: its depth, and its label among its siblings."""

    depth: int
    label: str


@dataclass(frozen=True)
class Table:
    """Rows under named columns. Numbers stay numbers, so that a widget can sort them; `formats` gives each column's format."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    formats: Mapping[str, Format]
    """By column; text where a column is missing."""
    marked: frozenset[int] = frozenset()
    """Positions of rows to highlight, such as a bad one."""
    is_sequence: bool = False
    """Whether the order of the rows is the content; a widget then neither sorts nor filters them."""
    tree: tuple[Place, ...] = ()
    """One place for each row, in depth-first order; empty for a flat table. The first cell still holds the row's full name."""
    whole: Table | None = None
    """The same table without merged rows, for a view with a filter."""

    def text(self, position: int) -> tuple[str, ...]:
        """The cells of one row, formatted."""
        return tuple(cell(value, self.format(column)) for column, value in zip(self.columns, self.rows[position], strict=True))

    def format(self, column: str) -> Format:
        """The format of a column."""
        return self.formats.get(column, "text")

    def is_text(self, column: str) -> bool:
        """Whether a column holds text, which is left-aligned; numbers are right-aligned."""
        return self.format(column) in {"text", "prose", "code"}

    def label(self, position: int, *, step: str = "  ", closed: bool = False) -> str:
        """The indented label of a tree row; a closed row gives the number of its descendants."""
        depth, label = self.tree[position]
        many = len(self.inside(position)) if closed else 0
        return f"{step * min(depth, _DEEPEST)}{cell(label)}{f'  + {many:,} inside' if many else ''}"

    def inside(self, position: int) -> range:
        """The descendants of a tree row, at any depth."""
        end = position + 1
        while end < len(self.tree) and self.tree[end].depth > self.tree[position].depth:
            end += 1
        return range(position + 1, end)

    def shown(self, rows: int, tree_rows: int) -> list[int]:
        """The positions that are shown first.

        Of a flat table, at most `rows`; marked ones move up where they would be hidden. Of a tree, the levels that have at most
        `tree_rows`, and marked rows with those around them.
        """
        if not self.tree:
            positions = list(range(len(self.rows)))
            if any(position >= rows for position in self.marked):
                positions.sort(key=lambda position: position not in self.marked)
            return positions[:rows]
        depths = [place.depth for place in self.tree]
        counts = Counter(depths)
        many = accumulate(counts[level] for level in range(max(depths) + 1))
        deepest = max(1, sum(count <= tree_rows for count in many) - 1)
        around = {*self.with_those_around(self.marked)}
        seen = [at for at, depth in enumerate(depths) if depth <= deepest or at in around]
        return sorted({*seen[:tree_rows], *(at for at in seen if at in self.marked)})

    def with_those_around(self, positions: Collection[int]) -> list[int]:
        """Rows of a tree, and those that they stand in; one pass from the last row to the first."""
        found: list[int] = []
        depth = -1  # of the last row that stays and whose holder is still to come
        for at in range(len(self.tree) - 1, -1, -1):
            own = self.tree[at].depth
            if at in positions or own < depth:
                found.append(at)
                depth = own
        return found[::-1]


@dataclass(frozen=True)
class Chart:
    """A line chart of values over steps; non-finite values are marked."""

    title: str
    values: tuple[float, ...]
    x_label: str
    y_label: str
    first_x: int = 0
    log: bool = True
    span: tuple[float, float] | None = None
    """Limits of the y axis; None for the smallest and largest value. Charts to be compared share one."""
    ends: tuple[str, str] | None = None
    """What stands below the first and the last value; None for their steps."""


@dataclass(frozen=True)
class Areas:
    """A stacked area chart over time, such as bytes by category, with the phases below it."""

    title: str
    series: tuple[tuple[str, tuple[float, ...]], ...]
    """Name and values; the first is at the bottom."""
    format: Format
    x_label: str
    stretches: tuple[tuple[str, int], ...] = ()
    """Phases: name, and first point."""
    marked: int = 0
    """The highlighted point."""
    marks: tuple[tuple[str, int], ...] = ()
    """Named points."""
    top: float | None = None
    """Upper limit of the y axis; None for the largest total. Charts to be compared share one."""
    bottom: float = 0.0
    """Where the scale begins: what lies below would only flatten the rest."""


@dataclass(frozen=True)
class Measure:
    """One quantity for each label, such as the parameters of each module."""

    name: str
    values: tuple[float, ...]
    format: Format


@dataclass(frozen=True)
class Bars:
    """A bar chart of several quantities over the same labels."""

    title: str
    labels: tuple[str, ...]
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class Heatmap:
    """A heatmap: one value for each row and column, or None."""

    title: str
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Name and values."""
    x_label: str
    columns_per_value: int = 1
    """Columns merged into each value."""
    log: bool = True
    is_quick: bool = False
    """Whether the heatmap is drawn live, as text in place of an image."""


@dataclass(frozen=True)
class Meters:
    """Gauges of several memories."""

    title: str
    gauges: tuple[Gauge, ...]


class Box(NamedTuple):
    """A box of `Boxes`."""

    name: str
    text: str
    status: Status
    stops: tuple[str, ...] = ()
    """Why the next box is not reached, one sentence each."""


@dataclass(frozen=True)
class Boxes:
    """A chain of boxes from top to bottom."""

    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Note:
    """A sentence with a status."""

    text: str
    status: Status = "info"


@dataclass(frozen=True)
class Fold:
    """Blocks that are collapsed at first."""

    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Areas | Facts | Code | Table | Chart | Bars | Boxes | Heatmap | Meters | Note | Fold | Verbatim"


@dataclass(frozen=True)
class Page:
    """A report as it is shown: the headline, then what to change, where, and the picture; whatever else there is folds."""

    instrument: str
    status: Status
    headline: str
    """What happened and where: at most 90 characters before the line that it quotes."""
    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        """Make a page whose rows say that something is wrong at least a caution: green means that nothing is."""
        if self.status in {"good", "info"} and any(map(_is_doubt, self.blocks)):
            object.__setattr__(self, "status", "warn")


def cut_short_by(page: Page, error: str) -> Page:
    """The page of a cell that an error ended, which says so where nothing worse was found."""
    if page.status not in {"good", "info"}:
        return page
    is_asked = error not in {"KeyboardInterrupt", "SystemExit"} and page.instrument != "torchdebug"
    explains = "" if not is_asked else "; `%torchdebug` in the next cell explains the error, where it can"
    unseen = Note(f"the cell ended with {error}: the lines after that were not watched{explains}", "warn")
    return replace(page, blocks=(*page.blocks, unseen))


_TRIED = {"verified": "it was run, and the fault was gone", "compiles": "it compiles, and was not run"}
"""By how far a fix was tried."""


def applicable(page: Page, state: str) -> Page:
    """The page of a report whose fix is code: below the fix, how to apply it."""
    for at, block in enumerate(page.blocks):
        if isinstance(block, Facts) and (row := next((row for row, (name, _) in enumerate(block.rows) if name == "fix"), None)) is not None:
            apply = ("apply", f"`%torchdebug fix` puts the changed code below; {_TRIED[state]}")
            rows = (*block.rows[: row + 1], apply, *block.rows[row + 1 :])
            return replace(page, blocks=(*page.blocks[:at], replace(block, rows=rows), *page.blocks[at + 1 :]))
    return page


def _is_doubt(block: Block) -> bool:
    """Whether a block says that something is wrong, was not seen or is to be changed."""
    match block:
        case Note():
            return block.status in {"warn", "bad"}
        case Facts():
            return any(name in _DOUBTS for name, _ in block.rows)
        case Boxes():
            return any(box.status in {"warn", "bad"} for box in block.boxes)
        case Fold():
            return any(map(_is_doubt, block.blocks))
        case _:
            return False


def quoted_span(line: str, sentence: str) -> tuple[int, int] | None:
    """Where the longest code in backticks that stands in the line once begins and ends; None where there is none.

    A call in backticks is found by its name, too: ``queue.get()`` in ``queue.get(timeout=2)``.
    """
    quoted = [text for code in re.findall(r"`([^`]+)`", sentence) for text in (code, code.removesuffix("()"))]
    found = [[one.span() for one in re.finditer(rf"(?<![\w.]){re.escape(text)}(?!\w)", line)] for text in quoted]
    spans = [places[0] for places in found if len(places) == 1 and places[0] != (0, len(line))]
    return max(spans, key=lambda span: span[1] - span[0], default=None)
