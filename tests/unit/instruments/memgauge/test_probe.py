"""A cell under the gauge: through both doors, with the exact peak, and never in the user's way."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch  # noqa: F401 - here, as its import would be the peak of the first test that makes it

import torchdebug_magics
from tests import children
from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.memgauge.probe import GaugeProbe
from torchdebug_magics.instruments.memgauge.report import LiveGauges
from torchdebug_magics.machine.process import rss_bytes, trim_heap
from torchdebug_magics.memory import gauges
from torchdebug_magics.memory.gauges import Allocator

if TYPE_CHECKING:
    from tests.doors import Observe

MIB = 2**20
SLACK = 16 * MIB


@pytest.fixture(autouse=True)
def no_freed_heap() -> None:
    """What earlier tests have freed would be used again, and nothing grow."""
    trim_heap()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchdebug")]


def test_an_empty_body(observe: Observe):
    report = observe("memgauge", "").report
    assert abs(report.rss_peak_bytes - rss_bytes()) < SLACK
    assert report.verdict.startswith("Process ")
    assert (report.interrupts, report.problems) == ((), ())
    assert report.title.endswith(" left")
    assert threads() == []


def test_the_peak_of_what_is_freed_at_once(observe: Observe):
    # Not by malloc: it could take 200 MiB out of the middle of the heap, and keep them.
    body = "import mmap\nx = mmap.mmap(-1, 200 << 20)\nfor page in range(0, len(x), 4096):\n    x[page] = 1\nx.close()"
    report = observe("memgauge", body).report
    assert report.rss_peak_is_exact
    assert abs(report.rss_peak_bytes - report.rss_start_bytes - 200 * MIB) < SLACK
    assert report.rss_end_bytes < report.rss_start_bytes + SLACK
    assert report.limit_bytes - report.limit_peak_bytes == report.left_bytes > 0


def test_growth_is_in_the_headline_and_in_the_picture(observe: Observe):
    body = "import time\nkept = []\nfor _ in range(4):\n    kept.append(bytearray(b'x') * (40 << 20))\n    time.sleep(0.6)"
    report = observe("memgauge", body).report
    assert abs(report.grown_bytes - 160 * MIB) < SLACK
    assert report.title.startswith("Process grew by 1")
    assert len(report.course_bytes) >= 4
    assert report.course_bytes[-1] - report.course_bytes[0] > 100 * MIB
    assert report.duration_s > 1.9


def test_an_error_inside_is_the_users_and_the_report_is_there(observe: Observe):
    observed = observe("memgauge", "x = bytearray(b'x') * (100 << 20)\n1 / 0")
    assert isinstance(observed.error, ZeroDivisionError)
    assert observed.report.rss_end_bytes - observed.report.rss_start_bytes > 90 * MIB
    assert threads() == []


def test_failing_while_attaching_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchdebug_magics.machine.sampler.Sampler.start", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), torchdebug_magics.memgauge():
        pass
    assert threads() == []


def test_nested_in_itself_and_in_another(observe: Observe):
    body = (
        "import torchdebug_magics\n"
        "with torchdebug_magics.memgauge() as inner, torchdebug_magics.nanhunt():\n"
        "    x = bytearray(b'x') * (150 << 20)\n"
        "    del x"
    )
    observed = observe("memgauge", body)
    for report in (observed.report, observed.namespace["inner"].report):
        assert abs(report.rss_peak_bytes - report.rss_start_bytes - 150 * MIB) < SLACK


def test_the_live_gauges_and_none_after_the_end():
    session = torchdebug_magics.memgauge()
    assert session.live() is None
    with session:
        snapshot = session.live()
        assert isinstance(snapshot, LiveGauges)
        assert snapshot.gauges[0].label == "this process (RSS)"
        assert snapshot.rss_peak_bytes >= snapshot.gauges[0].used_bytes - SLACK
    assert session.live() is None


def test_what_others_use_counts_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEM_LIMIT", str(rss_bytes() + 500 * MIB))
    with torchdebug_magics.memgauge() as session:
        bytearray(b"x") * (100 << 20)
    alone = session.report
    assert alone.limit == "MEM_LIMIT of this server"
    assert abs((alone.left_bytes or 0) - 400 * MIB) < SLACK
    assert "other processes" not in alone.verdict
    others = alone.__class__(**{**vars(alone), "limit_peak_bytes": alone.rss_peak_bytes + 300 * MIB})
    assert "other processes use" in others.verdict
    assert abs((others.left_bytes or 0) - 100 * MIB) < SLACK


def device(allocated: int, peak: int) -> Allocator:
    return Allocator(0, "GPU 0 · NVIDIA T4", "a", allocated, allocated, 1000, peak)


@pytest.mark.parametrize(
    ("readings", "peak_bytes", "is_exact"),
    [
        ([device(5, 50), device(5, 80)], 80, True),  # the counter has risen: its height is of this cell
        ([device(5, 50), device(30, 50)], 30, False),  # it stood higher before: only what was seen is known
        ([None, device(5, 9)], 9, True),
    ],
)
def test_the_peak_of_a_device_without_a_reset(
    monkeypatch: pytest.MonkeyPatch, readings: list[Allocator | None], peak_bytes: int, is_exact: bool
):
    now = iter([readings[0], *[readings[1]] * 1000])
    monkeypatch.setattr(gauges.Allocators, "read", lambda _: [one for one in [next(now)] if one is not None])
    with torchdebug_magics.memgauge() as session:
        pass
    (found,) = session.report.devices
    assert (found.peak_bytes, found.is_exact) == (peak_bytes, is_exact)
    assert ("at least" in session.report.verdict) is not is_exact


def test_a_failure_of_ours_is_a_line_and_the_cell_goes_on(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(gauges.Allocators, "read", fails)
    with torchdebug_magics.memgauge() as session:
        done = True
    assert done
    assert any("OSError: gone" in problem for problem in session.report.problems)


# The guard ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """A limit of half a GiB above what is used now."""
    limit_bytes = rss_bytes() + 512 * MIB
    monkeypatch.setenv("MEM_LIMIT", str(limit_bytes))
    return limit_bytes


def share_at(more_mib: int) -> str:
    """The guard that steps in when so much more is used."""
    return f"{100 * (rss_bytes() + more_mib * MIB) / (rss_bytes() + 512 * MIB):.2f}%"


ALLOCATE = "import time\nkept = []\nfor _ in range(100):\n    kept.append(bytearray(b'x') * (5 << 20))\n    time.sleep(0.02)"


def test_the_guard_interrupts_and_what_was_made_is_there(observe: Observe, little_memory: int):
    observed = observe("memgauge", ALLOCATE, guard=share_at(100))
    assert isinstance(observed.error, KeyboardInterrupt)
    assert 10 < len(observed.namespace["kept"]) < 90
    (interrupt,) = observed.report.interrupts
    assert interrupt.whose == "MEM_LIMIT of this server"
    assert interrupt.limit_bytes == little_memory
    assert interrupt.used_bytes >= interrupt.guard_ratio * little_memory
    assert "guard: interrupted the cell" in observed.report.verdict
    held = dict(observed.report.holders)
    made = {name: size_bytes for name, size_bytes in held.items() if "kept" in name or "'names'" in name}  # of a script: its dict
    assert max(made.values(), default=0) > 50 * MIB, held  # a worker of the tests may hold more than the cell
    assert min(held.values()) > MIB
    assert threads() == []


def test_a_guard_that_is_not_reached_does_nothing(observe: Observe, little_memory: int):
    observed = observe("memgauge", "import time\nx = bytearray(b'x') * (50 << 20)\ntime.sleep(0.2)", guard=share_at(300))
    assert (observed.error, observed.report.interrupts) == (None, ())


def test_after_an_interrupt_one_can_clean_up_and_a_new_crossing_counts_again(little_memory: int):
    kept: list[bytearray] = []
    guard = share_at(60)

    def allocate(times: int) -> None:
        for _ in range(times):
            kept.append(bytearray(b"x") * (5 << 20))
            time.sleep(0.01)

    with torchdebug_magics.memgauge(guard=guard) as session:
        with pytest.raises(KeyboardInterrupt):
            allocate(100)
        time.sleep(0.3)  # still above: no second interrupt while nothing grows
        kept.clear()
        time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt):
            allocate(100)
        kept.clear()
    assert len(session.report.interrupts) == 2


@pytest.mark.parametrize("guard", ["0%", "100%", "150%", "x", "", "90 percent", 0, 7, "nan%"])
def test_a_guard_that_makes_no_sense_is_refused(guard: str | float):
    with pytest.raises(TorchDebugError, match="such as 90%"):
        GaugeProbe(guard=guard)


def test_without_torch_it_stays_without():
    code = (
        "import sys, torchdebug_magics\n"
        "with torchdebug_magics.memgauge(guard='99.9%') as session: session.live()\n"
        "assert session.report.rss_peak_bytes and 'torch' not in sys.modules"
    )
    children.python("-c", code)
