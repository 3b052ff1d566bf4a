"""Two instruments without torch, `one` and `two`, for tests of the kernel: they note what happens to them, and fail on request."""

from __future__ import annotations

import contextlib
import linecache
import time
from typing import TYPE_CHECKING, Any

from torchdebug_magics import catalog
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instrument import Instrument, Option

if TYPE_CHECKING:
    from tests.kernel.fakes.one.report import FakeReport

log: list[str] = []
"""What happened since it was last cleared."""
open_now: list[str] = []


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
        from tests.kernel.fakes.one.report import FakeReport

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


def row_of(name: str) -> Instrument:
    return Instrument(
        name=name,
        module=f"{__name__}.{name}",
        summary=f"the fake called {name}",
        description=f"Describes {name}, 100% of it.\n\n    %%{name} --label x     an example",
        options=(
            Option("--fail", "fail at WHEN", {"default": "", "metavar": "WHEN", "choices": ("open", "close", "report")}),
            Option("--slow", "sleep at WHEN", {"default": "", "metavar": "WHEN"}),
            Option("--label", "added to the name", {"default": "", "metavar": "TEXT"}),
            Option("--live", "have something to see", {"action": "store_true"}),
        ),
        subjects="VALUE" if name == "one" else "",
    )


def forget_cells(shell: Any) -> None:
    """Make a kernel that has run a thousand cells of tests one that has run a few, as a user's: what explains an error reads them all."""
    for cache in (linecache.cache, getattr(linecache, "_ipython_cache", {})):
        for name in [name for name in cache if "ipykernel_" in name or name.startswith("<ipython-input")]:
            del cache[name]
    for history in (shell.history_manager.input_hist_parsed, shell.history_manager.input_hist_raw):
        history[:] = [""] * len(history)  # as `%reset in` leaves them: a number still finds its place


def register() -> None:
    """Add them to the catalog of this process; `load_ext` comes after."""
    catalog.INSTRUMENTS.update({name: f"{__name__}.{name}" for name in ("one", "two")})
