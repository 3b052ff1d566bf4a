"""Its page."""

from __future__ import annotations

from tests.kernel.fakes.one.report import FakeReport
from torchdebug_magics.html.page import Facts, Fold, Page, Table


def page(report: FakeReport) -> Page:
    table = Table("numbers", ("name", "size"), (("alpha", 1), ("beta", 3), ("gamma", 2)), {"size": "count"}, frozenset({1}))
    return Page(report.name, "good", report.verdict, (Facts((("fact", "value"),)), Fold("more", (table,))))


def live_page(snapshot: object) -> Page:
    return Page("live", "info", f"looked {snapshot} times")
