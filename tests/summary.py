"""The last lines of a run: its minutes, the cores that it used, and the files of tests that took longest."""

from __future__ import annotations

import resource
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

WAITS = "waits"
ONLY_WAITING_FAILED = 7
"""The exit status where each test that failed carries the mark `waits`: these may be run once more, alone."""
DEAREST = 10


class Summary:
    """Adds up what the reports of all workers say."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._failed_waiting: list[bool] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self._failed_waiting.append(WAITS in report.keywords)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed_waiting.append(False)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self._failed_waiting and all(self._failed_waiting):
            session.exitstatus = ONLY_WAITING_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if not self._seconds:
            return
        took_s = time.monotonic() - self._begin_s
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        terminalreporter.section("where the time went")
        terminalreporter.write_line(f"{took_s / 60:.1f} minutes, {cpu_s:.0f} core-seconds: {cpu_s / took_s:.1f} cores")
        for file, seconds in self._seconds.most_common(DEAREST):
            terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
