"""The report of one mark, and of all marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchdebug_magics.format import byte_size, plural, signed
from torchdebug_magics.report import Mark, Report

_WIDEST = 90
"""Characters of a headline."""
SIZES: Mapping[str, Callable[[Mark], int | None]] = {
    "MA": lambda mark: mark.allocated_bytes,
    "Max_MA": lambda mark: mark.max_allocated_bytes,
    "CA": lambda mark: mark.reserved_bytes,
    "Max_CA": lambda mark: mark.max_reserved_bytes,
    "NV": lambda mark: mark.driver_bytes,
    "unaccounted": lambda mark: mark.unaccounted_bytes,
    "RSS": lambda mark: mark.rss_bytes,
    "limit used": lambda mark: mark.limit_used_bytes,
    "limit": lambda mark: mark.limit_bytes,
}
"""The numbers of a mark, by title."""


@dataclass(frozen=True, kw_only=True)
class MarkReport(Report):
    """The mark that was just taken."""

    mark: Mark
    before: Mark | None
    """The mark before it; None for the first."""

    @property
    def verdict(self) -> str:
        """The row, with the change since the mark before it."""
        return f"{name(self.mark)}: {' | '.join(self.cells())}"

    @property
    def title(self) -> str:
        """As many numbers of the row as fit into a headline; `rest` has the others."""
        return f"{name(self.mark)}: {' | '.join(self.cells()[: self._fitting()])}"

    @property
    def rest(self) -> str:
        """The numbers that `title` leaves out."""
        return " | ".join(self.cells()[self._fitting() :])

    def _fitting(self) -> int:
        widths = accumulate((len(cell) + 3 for cell in self.cells()), initial=len(name(self.mark)))
        return max(1, sum(width <= _WIDEST for width in widths) - 1)

    def cells(self) -> list[str]:
        """Every number that is known, with its name and its change."""
        mark, before = self.mark, self.before
        is_old = before is not None and before.device == mark.device and not mark.max_is_new
        same_limit = before is not None and before.limit == mark.limit
        notes = {"Max_MA": " (older than the last mark)" if is_old else "", "limit used": f" of {byte_size(mark.limit_bytes or 0)}"}
        cells = []
        for title, size in SIZES.items():
            now, earlier = size(mark), None if before is None or title.startswith("Max_") else size(before)
            if now is not None and title != "limit":
                change = "" if earlier is None or (title == "limit used" and not same_limit) else f" ({signed(now - earlier)})"
                cells.append(f"{mark.limit if title == 'limit used' else title} {byte_size(now)}{notes.get(title, '')}{change}")
        return cells


@dataclass(frozen=True, kw_only=True)
class MarksReport(Report):
    """Every mark so far."""

    marks: tuple[Mark, ...]

    @property
    def verdict(self) -> str:
        """Between which two marks memory grew most."""
        if not self.marks:
            return "No marks so far: `%memmark before forward` takes one"
        marks = plural(len(self.marks), "mark")
        if len(self.marks) == 1:
            return f"{marks}: {name(self.marks[0])}"
        allocated = [mark.allocated_bytes for mark in self.marks if mark.allocated_bytes is not None]
        what, sizes = ("MA", allocated) if len(allocated) == len(self.marks) else ("RSS", [mark.rss_bytes for mark in self.marks])
        most_bytes, at = max((after - before, at) for at, (before, after) in enumerate(pairwise(sizes)))
        if most_bytes <= 0:
            return f"{marks}; {what} did not grow between any two marks"
        return f"{marks}; {what} grew most, by {byte_size(most_bytes)}, between `{name(self.marks[at])}` and `{name(self.marks[at + 1])}`"


def name(mark: Mark) -> str:
    """The label, after the rank where there is one."""
    return mark.label if mark.rank is None else f"[{mark.rank}] {mark.label}"
