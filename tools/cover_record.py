"""Records which branches of the package each test reaches, and how long it takes: a pytest plugin for Python 3.12 or later.

``-p tools.cover_record --cover-to FOLDER`` writes a line of JSON a test. Processes that a test starts count, too: each writes what it has
reached when it ends; what ended while a test ran belongs to that test.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import branches_reached

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Without the option, this plugin does nothing."""
    parser.addoption("--cover-to", help="the folder for what each test reaches")


def pytest_configure(config: pytest.Config) -> None:
    """Watch this process, if tests run in it, and every Python that is started from it."""
    folder = config.getoption("--cover-to")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ[branches_reached.FOLDER] = folder
    site = Path(folder, "site")
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text("from tools import branches_reached\nbranches_reached.begin_in_child()\n", encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", 0):
        return
    branches_reached.begin()
    config.pluginmanager.register(Recorder(Path(folder)))


def pytest_collection_finish() -> None:
    """A kernel in which a hanging cell has run is asked before it is used again or killed."""
    door = sys.modules.get("tests.hang_cases.door")
    if door is None:
        return
    run = door._Seat._run  # noqa: SLF001 - only here a kernel is asked between its cells

    def run_and_flush(seat: Any, kernel: Any, case: Any, outcome: Any) -> None:
        run(seat, kernel, case, outcome)
        kernel.run(f"from tools import branches_reached; branches_reached.flush({f'{outcome.stack}-{case.name}'!r})", timeout_s=20)

    door._Seat._run = run_and_flush  # noqa: SLF001


class Recorder:
    """Writes a line a test."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"tests-{os.getpid()}.jsonl").open("a", encoding="utf-8")

    @staticmethod
    def _cpu_s() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """A thorough test is none that `make test` could choose."""
        if item.get_closest_marker("thorough") is not None:
            return (yield)
        branches_reached.taken()
        start, began, cpu = time.monotonic(), time.time(), self._cpu_s()
        result = yield
        took = time.monotonic() - start
        cpu = self._cpu_s() - cpu
        line = {
            "test": item.nodeid,
            "worker": os.environ.get(branches_reached.WORKER),
            "took_s": round(took, 4),
            "cpu_s": round(cpu, 4),
            "began": began,
            "ended": time.time(),
            "branches": branches_reached.taken(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return result
