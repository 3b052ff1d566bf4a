"""What a view is made of: a verdict and blocks, pure data. `markup` writes a page as HTML, `plain` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchdebug_magics.format import Format, cell

__all__ = ["Block", "Cell", "Chart", "Code", "Facts", "Fold", "Note", "Page", "Status", "Table"]

Status: TypeAlias = Literal["good", "bad", "warn", "info", "busy"]
Cell: TypeAlias = str | int | float | None


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

    def text(self, position: int) -> tuple[str, ...]:
        """The cells of one row as they are written."""
        return tuple(cell(value, self.format(column)) for column, value in zip(self.columns, self.rows[position], strict=True))

    def format(self, column: str) -> Format:
        """How a column is written."""
        return self.formats.get(column, "text")

    def is_text(self, column: str) -> bool:
        """Whether a column holds words, which begin at the left; numbers end at the right."""
        return self.format(column) in {"text", "prose", "code"}

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


Block: TypeAlias = "Facts | Code | Table | Chart | Note | Fold"


@dataclass(frozen=True)
class Page:
    """A report as it is shown: the verdict first."""

    instrument: str
    status: Status
    verdict: str
    blocks: tuple[Block, ...] = ()
