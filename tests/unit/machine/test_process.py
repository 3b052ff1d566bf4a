"""What a process occupies, its exact peak, and its children."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import children
from torchdebug_magics.machine import process
from torchdebug_magics.machine.process import PeakRss, RssCourse, address_space_bytes, rss_bytes, workers

pytestmark = pytest.mark.waits

MIB = 2**20
SLACK = 8 * MIB


def occupy(size_mib: int) -> mmap.mmap:
    """Every page is written, so that it counts; mapped anew, as the heap of a process that ran other tests may have room."""
    room = mmap.mmap(-1, size_mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, len(room), mmap.PAGESIZE):
        room[start] = 1
    return room


def test_rss_is_the_systems():
    assert abs(rss_bytes() - psutil.Process().memory_info().rss) < SLACK
    assert rss_bytes() < address_space_bytes()


def test_rss_without_proc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_STATM", Path("nowhere"))
    memory = psutil.Process().memory_info()
    assert abs(rss_bytes() - memory.rss) < SLACK
    assert abs(address_space_bytes() - memory.vms) < SLACK


def measured(size_mib: int) -> PeakRss:
    peak = PeakRss()
    peak.start()
    occupy(size_mib)
    peak.stop()
    return peak


def test_the_peak_is_exact_for_what_no_sample_saw_and_begins_anew():
    before = rss_bytes()
    for size_mib in (200, 50):
        found = measured(size_mib).peak()
        assert found.source == "counter"
        assert abs(found.size_bytes - before - size_mib * MIB) < SLACK


def test_the_peak_is_that_of_the_time_until_it_was_stopped():
    found = measured(20)
    occupy(100)
    assert found.peak().size_bytes < rss_bytes() + 40 * MIB


def test_two_that_overlap_read_the_one_counter_both():
    before = rss_bytes()
    outer, inner = PeakRss(), PeakRss()
    outer.start()
    occupy(150)
    inner.start()
    occupy(30)
    inner.stop()
    outer.stop()
    assert abs(inner.peak().size_bytes - before - 30 * MIB) < SLACK
    assert abs(outer.peak().size_bytes - before - 150 * MIB) < SLACK


# A new interpreter, as the peak of this one's life is that of some other test.
WITHOUT_RESET = """
from pathlib import Path
from torchdebug_magics.machine import process
process._CLEAR_REFS = Path("/nowhere/clear_refs")
peak = process.PeakRss()
peak.start()
bytearray(b"x") * (64 << 20)
first = peak.peak()
assert first.source == "counter" and abs(first.size_bytes - process.rss_bytes() - (64 << 20)) < (16 << 20), first
again = process.PeakRss()
again.start()
again.sample(process.rss_bytes() + 77)
bytearray(b"x") * (8 << 20)
second = again.peak()
assert second.source == "samples" and second.size_bytes < first.size_bytes, second
"""


def test_where_the_counter_cannot_be_reset_it_is_used_as_far_as_it_is_exact():
    children.python("-c", WITHOUT_RESET)


def fill(ready: Any, end: Any) -> None:
    kept = occupy(30)
    ready.set()
    end.wait(60)
    del kept


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_workers_are_counted_by_their_share(way: str):
    assert workers() == ()
    context = multiprocessing.get_context(way)
    ready, end = context.Event(), context.Event()
    child = context.Process(target=fill, args=(ready, end))
    child.start()
    try:
        assert ready.wait(30)
        (worker,) = workers()
        assert worker.pid == child.pid
        assert 30 * MIB <= worker.uss_bytes <= worker.pss_bytes
    finally:
        end.set()
        child.join()
    assert workers() == ()


def course(*samples: int, most: int = 8) -> tuple[int, ...]:
    made = RssCourse(most)
    for one in samples:
        made.add(one)
    return made.points


def test_few_samples_are_kept_as_they_are():
    assert course() == ()
    assert course(3, 1, 2) == (3, 1, 2)


def test_many_are_few_points_that_rise_with_them():
    points = course(*range(1000))
    assert 4 <= len(points) <= 9
    assert list(points) == sorted(points)
    assert points[-1] == 999


def test_a_single_peak_is_never_lost():
    samples = [1] * 777
    samples[300] = 50
    assert max(course(*samples)) == 50
