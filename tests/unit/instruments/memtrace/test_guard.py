"""A traced cell that the guard interrupts: the report says so, and what had grown until then."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch  # noqa: F401 - here, as its import would use what the tests leave

import torchdebug_magics
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.machine.process import rss_bytes

if TYPE_CHECKING:
    from tests.doors import Observe

MIB = 2**20
LEAK = """\
import time, torch
kept = []
for _ in range(200):
    kept.append(torch.ones(2 << 18))
    time.sleep(0.02)
"""


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    """A limit of half a GiB above what is used now, and the guard that steps in at a fifth of that."""
    used_bytes = rss_bytes()
    monkeypatch.setenv("MEM_LIMIT", str(used_bytes + 512 * MIB))
    return f"{100 * (used_bytes + 100 * MIB) / (used_bytes + 512 * MIB):.2f}%"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchdebug")]


def test_the_cell_is_interrupted_and_the_report_tells_of_it(observe: Observe, little_memory: str):
    observed = observe("memtrace", LEAK, guard=little_memory)
    assert isinstance(observed.error, KeyboardInterrupt)
    assert 10 < len(observed.namespace["kept"]) < 150
    report = observed.report
    (interrupt,) = report.interrupts
    assert interrupt.whose == "MEM_LIMIT of this server"
    assert "guard: interrupted the cell" in report.verdict
    assert "kept" in report.holders[0].path
    assert threads() == []


def test_a_guard_that_is_not_reached_says_nothing(observe: Observe, little_memory: str):
    observed = observe("memtrace", "import time, torch\nx = torch.ones(1 << 18)\ntime.sleep(0.2)", guard=little_memory)
    assert (observed.error, observed.report.interrupts) == (None, ())
    assert "nterrupt" not in observed.report.verdict


@pytest.mark.parametrize(("guard", "said"), [("1%", "are used already"), ("90 percent", "such as 90%")])
def test_a_guard_that_makes_no_sense_is_refused(little_memory: str, guard: str, said: str):
    with pytest.raises(TorchDebugError, match=said):
        torchdebug_magics.memtrace(guard=guard)
