"""Two instruments without torch, `one` and `two`, for tests of the kernel: they note what happens to them, and fail on request."""

from __future__ import annotations

import contextlib
import sys
import time
import types
from dataclasses import dataclass

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.html.page import Facts, Fold, Page, Table
from torchdebug_magics.instrument import Instrument, Option
from torchdebug_magics.report import Report

log: list[str] = []
"""What happened since it was last cleared."""
open_now: list[str] = []


@dataclass(frozen=True, kw_only=True)
class FakeReport(Report):
    name: str
    error: str = ""

    @property
    def verdict(self) -> str:
        return f"verdict of {self.name}{self.error}"


class FakeProbe:
    def __init__(self, name: str, *, fail: str = "", slow: str = "", live: bool = False, label: str = "") -> None:
        self._name, self._fail, self._slow, self._live, self._label = name, fail, slow, live, label
        self._looked = 0

    def attach(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self._detach)
        open_now.append(self._name)
        log.append(f"open {self._name}")
        self._trouble("open")

    def _detach(self) -> None:
        self._trouble("close")
        self.sweep()
        log.append(f"close {self._name}")

    def sweep(self) -> None:
        while self._name in open_now:
            open_now.remove(self._name)

    def report(self) -> FakeReport:
        self._trouble("report")
        return FakeReport(name=self._name + self._label)

    def live(self) -> object | None:
        self._looked += 1
        return self._looked if self._live else None

    def kept(self) -> dict[str, object]:
        return {"bad": {"output": self._name}}

    def _trouble(self, when: str) -> None:
        if self._slow == when:
            self._slow = ""
            time.sleep(20)
        if self._fail == when:
            msg = f"{self._name} failed at {when}"
            raise TorchDebugError(msg)


def view(report: FakeReport) -> Page:
    table = Table("numbers", ("name", "size"), (("alpha", 1), ("beta", 3), ("gamma", 2)), {"size": "count"}, frozenset({1}))
    return Page(report.name, "good", report.verdict, (Facts((("fact", "value"),)), Fold("more", (table,))))


def broken_view(report: FakeReport) -> Page:
    msg = "no view today"
    raise RuntimeError(msg)


def live_view(snapshot: object) -> Page:
    return Page("live", "info", f"looked {snapshot} times")


def examine(*values: object, **options: object) -> FakeReport:
    log.append(f"examine {values!r} {options['label']!r}")
    return FakeReport(name="examined")


def _row(name: str) -> Instrument:
    return Instrument(
        name=name,
        summary=f"the fake called {name}",
        description=f"Describes {name}, 100% of it.\n\n    %%{name} --label x     an example",
        options=(
            Option("--fail", "fail at WHEN", {"default": "", "metavar": "WHEN", "choices": ("open", "close", "report")}),
            Option("--slow", "sleep at WHEN", {"default": "", "metavar": "WHEN"}),
            Option("--label", "added to the name", {"default": "", "metavar": "TEXT"}),
            Option("--live", "have something to see", {"action": "store_true"}),
        ),
        probe=f"{__name__}:probe_{name}",
        view=f"{__name__}:{'view' if name == 'one' else 'broken_view'}",
        live_view=f"{__name__}:live_view",
        examine=f"{__name__}:examine" if name == "one" else None,
        subjects="VALUE" if name == "one" else "",
    )


def probe_one(**options: object) -> FakeProbe:
    return FakeProbe("one", **options)


def probe_two(**options: object) -> FakeProbe:
    return FakeProbe("two", **options)


def register() -> None:
    """Add them to the catalog of this process; `load_ext` comes after."""
    catalog.INSTRUMENTS["one"] = __name__
    module = types.ModuleType(f"{__name__}_two")
    module.INSTRUMENT = _row("two")
    sys.modules[module.__name__] = module
    catalog.INSTRUMENTS["two"] = module.__name__


INSTRUMENT = _row("one")
