"""The report of one mark, and of all marks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchdebug_magics.format import byte_size, plural
from torchdebug_magics.report import Mark, Report

_WIDEST = 90
"""Characters of a headline."""


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
        same = before is not None and before.device == mark.device
        old = " (older than the last mark)" if same and not mark.max_is_new else ""
        cells = [
            _cell("MA", mark.allocated_bytes, before.allocated_bytes if before else None),
            _cell("Max_MA", mark.max_allocated_bytes, None, old),
            _cell("CA", mark.reserved_bytes, before.reserved_bytes if before else None),
            _cell("Max_CA", mark.max_reserved_bytes, None),
            _cell("NV", mark.driver_bytes, before.driver_bytes if before else None),
            _cell("unaccounted", mark.unaccounted_bytes, before.unaccounted_bytes if before else None),
            _cell("RSS", mark.rss_bytes, before.rss_bytes if before else None),
            self._limit(),
        ]
        return [cell for cell in cells if cell]

    def _limit(self) -> str:
        mark, before = self.mark, self.before
        if mark.limit_bytes is None:
            return ""
        same = before is not None and before.limit == mark.limit
        of = f" of {byte_size(mark.limit_bytes)}"
        return _cell(mark.limit, mark.limit_used_bytes, before.limit_used_bytes if before and same else None, of)


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


def _cell(title: str, size_bytes: int | None, before_bytes: int | None, more: str = "") -> str:
    if size_bytes is None:
        return ""
    change = "" if before_bytes is None else f" ({signed(size_bytes - before_bytes)})"
    return f"{title} {byte_size(size_bytes)}{more}{change}"


def signed(size_bytes: int) -> str:
    """``+1.5 MiB``."""
    return f"{'-' if size_bytes < 0 else '+'}{byte_size(abs(size_bytes))}"
