"""What a view is made of: a verdict and blocks, pure data. `markup` writes a page as HTML, `plain` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torchdebug_magics.format import Format, cell

if TYPE_CHECKING:
    from torchdebug_magics.report import Gauge

__all__ = [
    "Areas",
    "Bars",
    "Block",
    "Box",
    "Boxes",
    "Cell",
    "Chart",
    "Code",
    "Facts",
    "Fold",
    "Heatmap",
    "Measure",
    "Meters",
    "Note",
    "Page",
    "Place",
    "Status",
    "Table",
]

Status: TypeAlias = Literal["good", "bad", "warn", "info", "busy"]
Cell: TypeAlias = str | int | float | None

_DEEPEST = 24
"""Levels of a tree that are told apart by how far a row stands to the right."""


@dataclass(frozen=True)
class Facts:
    """Named values, one a line: ``("fix", "add 1e-12 before the log")``."""

    rows: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Code:
    """An excerpt of the user's code with one line marked."""

    lines: tuple[tuple[int, str], ...]
    """Line number, as the user sees it, and text."""
    marked: int | None = None
    title: str = ""


class Place(NamedTuple):
    """Where a row stands in a tree: its depth, and what it is called among its neighbours."""

    depth: int
    label: str


@dataclass(frozen=True)
class Table:
    """Rows under named columns. Numbers stay numbers, so that a widget can sort them; `formats` says how a column is written."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    formats: Mapping[str, Format]
    """By column; a column that is not named holds text."""
    marked: frozenset[int] = frozenset()
    """Rows to be seen first (a bad one), by position."""
    is_sequence: bool = False
    """Whether the order of the rows is what it tells: then a widget neither sorts nor filters them."""
    tree: tuple[Place, ...] = ()
    """One place a row, in the order of a tree read from the top; empty where there is none. The first cell still names a row in full."""
    whole: Table | None = None
    """The same with nothing folded together, for a view in which one can search."""

    def text(self, position: int) -> tuple[str, ...]:
        """The cells of one row as they are written."""
        return tuple(cell(value, self.format(column)) for column, value in zip(self.columns, self.rows[position], strict=True))

    def format(self, column: str) -> Format:
        """How a column is written."""
        return self.formats.get(column, "text")

    def is_text(self, column: str) -> bool:
        """Whether a column holds words, which begin at the left; numbers end at the right."""
        return self.format(column) in {"text", "prose", "code"}

    def label(self, position: int, *, step: str = "  ", closed: bool = False) -> str:
        """What a row of a tree is called where it stands, a step to the right for each level; a closed one says how many it holds."""
        depth, label = self.tree[position]
        many = len(self.inside(position)) if closed else 0
        return f"{step * min(depth, _DEEPEST)}{cell(label)}{f'  + {many:,} inside' if many else ''}"

    def inside(self, position: int) -> range:
        """The rows that stand in a row of a tree, at any depth."""
        end = position + 1
        while end < len(self.tree) and self.tree[end].depth > self.tree[position].depth:
            end += 1
        return range(position + 1, end)

    def seen_first(self, cap: int) -> list[int]:
        """Of a tree, the rows down to the depth at which there are at most `cap`; a marked one always, with those that it stands in."""
        depths = [place.depth for place in self.tree]
        deepest = self.open_depth(cap)
        around = {at for mark in self.marked for at in self._around(mark)}
        return [at for at, depth in enumerate(depths) if depth <= deepest or at in around]

    def open_depth(self, cap: int) -> int:
        """The deepest level of a tree down to which there are at most `cap` rows; the first below the roots at least."""
        depths = Counter(place.depth for place in self.tree)
        many = list(accumulate(depths[level] for level in range(max(depths, default=0) + 1)))
        return max(1, sum(rows <= cap for rows in many) - 1)

    def _around(self, position: int) -> set[int]:
        depth, found = self.tree[position].depth, {position}
        for at in range(position - 1, -1, -1):
            if self.tree[at].depth < depth:
                depth = self.tree[at].depth
                found.add(at)
        return found

    def order(self, cap: int) -> list[int]:
        """Positions in the order to be shown: as they are, unless a marked row would fall beyond `cap`."""
        positions = range(len(self.rows))
        hidden = any(position >= cap for position in self.marked)
        return sorted(positions, key=lambda position: position not in self.marked) if hidden else list(positions)


@dataclass(frozen=True)
class Chart:
    """A line of values over steps; non-finite values are marked."""

    title: str
    values: tuple[float, ...]
    x_label: str
    y_label: str
    first_x: int = 0
    log: bool = True
    span: tuple[float, float] | None = None
    """Both ends of the scale; None for the smallest and the largest value. Charts that are to be compared have the same."""


@dataclass(frozen=True)
class Areas:
    """Quantities on top of each other over time, such as bytes by category, and what went on meanwhile."""

    title: str
    series: tuple[tuple[str, tuple[float, ...]], ...]
    """Name and values; the first lies at the bottom."""
    format: Format
    x_label: str
    stretches: tuple[tuple[str, int], ...] = ()
    """What went on, and from which point on."""
    marked: int = 0
    """The point to be seen first."""
    marks: tuple[tuple[str, int], ...] = ()
    """Named points."""
    top: float | None = None
    """Where the scale ends; None for the most that is drawn. Pictures that are to be compared have the same."""


@dataclass(frozen=True)
class Measure:
    """One quantity of each thing, such as the parameters of each module."""

    name: str
    values: tuple[float, ...]
    format: Format


@dataclass(frozen=True)
class Bars:
    """How some quantities are spread over the same things, in bars side by side."""

    title: str
    labels: tuple[str, ...]
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class Heatmap:
    """One value for each row and column, as colours; None where there is none."""

    title: str
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Name and values."""
    x_label: str
    columns_per_value: int = 1
    """How many columns a value stands for."""
    log: bool = True
    is_quick: bool = False
    """Whether it is drawn many times, and is gone soon: then without an image."""


@dataclass(frozen=True)
class Meters:
    """How full each of some memories is, live or as it was."""

    title: str
    gauges: tuple[Gauge, ...]


class Box(NamedTuple):
    """One of some boxes."""

    name: str
    text: str
    status: Status
    stops: tuple[str, ...] = ()
    """What stops the way to the next one, in sentences."""


@dataclass(frozen=True)
class Boxes:
    """Boxes in which one thing leads to the next, from top to bottom."""

    title: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Note:
    """A sentence under the verdict."""

    text: str
    status: Status = "info"


@dataclass(frozen=True)
class Fold:
    """Blocks that are closed until asked for."""

    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Areas | Facts | Code | Table | Chart | Bars | Boxes | Heatmap | Meters | Note | Fold"


@dataclass(frozen=True)
class Page:
    """A report as it is shown: the verdict first."""

    instrument: str
    status: Status
    verdict: str
    blocks: tuple[Block, ...] = ()
