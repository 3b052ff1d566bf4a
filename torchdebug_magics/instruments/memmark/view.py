"""What marks show: one mark as a row, all marks as a table and a picture."""

from __future__ import annotations

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
    limit_used = f"{whose.pop()} used" if len(whose) == 1 else "limit used"
    columns: dict[str, list[Cell]] = {"mark": [name(mark) for mark in marks]}
    for title, size in known.items():
        sizes = [size(mark) for mark in marks]
        columns[limit_used if title == "limit used" else title] = [*sizes]
        if title == "Max_MA":
            columns["peak is"] = ["new" if mark.max_is_new else "older" for mark in marks]
        if title in _CHANGES:
            pairs = zip([None, *sizes], sizes, strict=False)
            columns[f"{title} change"] = [None if now is None or before is None else signed(now - before) for before, now in pairs]
    rows = list(zip(*columns.values(), strict=True))
    formats: dict[str, Format] = dict.fromkeys((*known, limit_used), "bytes")
    table = Table("Marks, with the change since the mark before", tuple(columns), rows, formats, is_sequence=True)
    drawn = [
        Chart(f"{what}, in MiB", tuple((known[title](mark) or 0) / _MIB for mark in marks), "mark", title, first_x=1, log=False)
        for title, what in _DRAWN.items()
        if title in known and len(marks) > 1
    ]
    more = [Fold(f"Pictures: {plural(len(drawn) - 1, 'more number')} over the marks", tuple(drawn[1:]))] if len(drawn) > 1 else []
    return [table, *drawn[:1], *more]
