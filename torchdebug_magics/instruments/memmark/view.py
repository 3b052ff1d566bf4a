"""What marks show: one mark as a row, all marks as a table and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchdebug_magics.format import Format, plural, signed
from torchdebug_magics.html.page import Block, Cell, Chart, Facts, Fold, Page, Table
from torchdebug_magics.instruments.memmark.report import SIZES, MarkReport, MarksReport, name
from torchdebug_magics.report import Mark

_MIB = 2**20
_DRAWN = {"MA": "MA: allocated by torch", "NV": "NV: in use on the whole GPU", "RSS": "RSS: this process"}
_CHANGES = ("MA", "RSS")


def page(report: MarkReport | MarksReport) -> Page:
    """One mark as a row, or all marks as a table with a picture."""
    rest = [] if isinstance(report, MarksReport) or not report.rest else [Facts((("also", report.rest),))]
    blocks = _all(report.marks) if isinstance(report, MarksReport) else rest
    return Page("memmark", "info", report.title, tuple(blocks))


def _all(marks: tuple[Mark, ...]) -> list[Block]:
    if not marks:
        return []
    known = {title: size for title, size in SIZES.items() if any(size(mark) is not None for mark in marks)}
    whose = {mark.limit for mark in marks}
    columns, formats = _columns(known, f"{whose.pop()} used" if len(whose) == 1 else "limit used")
    rows = [(name(mark), *_row(known, mark, marks[at - 1] if at else None)) for at, mark in enumerate(marks)]
    table = Table("Marks, with the change since the mark before", ("mark", *columns), rows, formats, is_sequence=True)
    drawn = [
        Chart(f"{what}, in MiB", tuple((known[title](mark) or 0) / _MIB for mark in marks), "mark", title, first_x=1, log=False)
        for title, what in _DRAWN.items()
        if title in known and len(marks) > 1
    ]
    more = [Fold(f"Pictures: {plural(len(drawn) - 1, 'more number')} over the marks", tuple(drawn[1:]))] if len(drawn) > 1 else []
    return [table, *drawn[:1], *more]


def _columns(known: Mapping[str, object], limit_used: str) -> tuple[list[str], dict[str, Format]]:
    columns: list[str] = []
    for title in known:
        columns.append(limit_used if title == "limit used" else title)
        if title == "Max_MA":
            columns.append("peak is")
        if title in _CHANGES:
            columns.append(f"{title} change")
    return columns, dict.fromkeys((*known, limit_used), "bytes")


def _row(known: Mapping[str, Callable[[Mark], int | None]], mark: Mark, before: Mark | None) -> list[Cell]:
    cells: list[Cell] = []
    for title, size in known.items():
        now, earlier = size(mark), None if before is None else size(before)
        cells.append(now)
        if title == "Max_MA":
            cells.append("new" if mark.max_is_new else "older")
        if title in _CHANGES:
            cells.append(None if now is None or earlier is None else signed(now - earlier))
    return cells
