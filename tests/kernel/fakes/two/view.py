"""A page that cannot be made."""

from __future__ import annotations

from tests.kernel.fakes.one.report import FakeReport
from torchdebug_magics.html.page import Page


def page(report: FakeReport) -> Page:
    msg = "no view today"
    raise RuntimeError(msg)


def live_page(snapshot: object) -> Page:
    return Page("live", "info", f"looked {snapshot} times")
