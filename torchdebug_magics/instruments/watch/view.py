"""The page of the instrument that leads, with one line for each other finding; or what was watched."""

from __future__ import annotations

from torchdebug_magics import catalog
from torchdebug_magics.format import capitalised, plural
from torchdebug_magics.html.page import Block, Facts, Fold, Note, Page
from torchdebug_magics.instruments.watch.report import WatchReport
from torchdebug_magics.report import Report


def page(report: Report) -> Page:
    """The page of a watch, or of the report that explains a cell afterwards."""
    if not isinstance(report, WatchReport):
        row = catalog.instrument_of(report)
        assert row is not None  # an instrument made it
        return row.contents(report)
    blocks: tuple[Block, ...] = tuple(Note(problem, "warn") for problem in report.problems)
    blocks += (Facts(tuple(("also", line) for line in report.consequences)),) if report.consequences else ()
    blocks += (Facts(tuple(report.values.items())),) if report.values else ()
    blocks += (Facts(tuple(("but", doubt) for doubt in report.doubts)),) if report.doubts else ()
    blocks += (_each(report),) if report.reports else ()
    if report.instrument is None:
        return Page("torchdebug", report.status, report.title, blocks)
    leading = catalog.instrument(report.instrument).contents(report.reports[report.instrument])
    first, rest = leading.blocks[:1], leading.blocks[1:]
    return Page("torchdebug", leading.status, leading.headline, (*first, *blocks[:-1], *rest, *blocks[-1:]))


def live_page(snapshot: object) -> Page:
    """Whether the cell makes progress; after a cell, who looks at its error."""
    if isinstance(snapshot, str):
        return Page("torchdebug", "busy", snapshot)
    return catalog.instrument("hangwatch").live_page(snapshot)


def _each(report: WatchReport) -> Fold:
    rows = tuple((catalog.instrument(name).magic, capitalised(own.title)) for name, own in report.reports.items())
    return Fold(f"What was watched: {plural(len(rows), 'magic')}", (Facts(rows),))
