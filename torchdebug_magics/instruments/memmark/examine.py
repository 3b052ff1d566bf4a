"""Takes a mark, or reports all marks."""

from __future__ import annotations

from torchdebug_magics.instrument import CellContext, Examined
from torchdebug_magics.instruments.memmark.report import MarkReport, MarksReport
from torchdebug_magics.memory.gauges import ledger


def examine(_: CellContext, *labels: object, force: bool = True, clear: bool = False) -> Examined:
    """The row of a mark taken now; without a label, the table of all marks. None where `force` is False."""
    book = ledger()
    if clear:
        book.clear()
    if not force:
        return Examined(None)
    if not labels:
        return Examined(MarksReport(marks=book.marks()))
    before = next(iter(book.marks()[-1:]), None)
    return Examined(MarkReport(mark=book.take(" ".join(map(str, labels))), before=before), is_said=True)
