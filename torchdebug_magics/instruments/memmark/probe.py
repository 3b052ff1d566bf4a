"""Takes a mark, or reports all marks."""

from __future__ import annotations

from torchdebug_magics.instruments.memmark.report import MarkReport, MarksReport
from torchdebug_magics.probing.marks import ledger
from torchdebug_magics.report import Report


def mark(*labels: object, force: bool = True, clear: bool = False) -> Report | None:
    """The row of a mark taken now; without a label, the table of all marks. None where `force` is False."""
    book = ledger()
    if clear:
        book.clear()
    if not force:
        return None
    if not labels:
        return MarksReport(marks=book.marks())
    before = next(iter(book.marks()[-1:]), None)
    return MarkReport(mark=book.take(" ".join(map(str, labels))), before=before)
