"""How hard it is for processes to get memory, from what the system writes down."""

from __future__ import annotations

import pytest

from torchdebug_magics.machine import limits
from torchdebug_magics.machine.limits import Limit, MemoryPressure, memory_pressure

GROUP, HOST, STATUS = "/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory", "/proc/self/status"
STALLED = "some avg10={} avg60=1.00 avg300=0.00 total=9\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=3"
LIMIT = Limit(1000, 950, None, "container limit")

SYSTEMS = {
    "quiet": ({GROUP: STALLED.format("0.00"), STATUS: "VmRSS:\t  9 kB\nVmSwap:\t       0 kB"}, LIMIT, (0.0, 0, 0.95, "container limit")),
    "the group waits": ({GROUP: STALLED.format("34.50"), HOST: STALLED.format("1.00")}, LIMIT, (0.345, 0, 0.95, "container limit")),
    "the host waits": ({GROUP: STALLED.format("1.00"), HOST: STALLED.format("20.00")}, LIMIT, (0.2, 0, 0.95, "container limit")),
    "swapped": ({STATUS: "VmSwap:\t    2048 kB\nThreads:\t1"}, None, (0.0, 2 << 20, 0.0, "")),
    "not told": ({}, None, (0.0, 0, 0.0, "")),
    "turned off": ({HOST: "", GROUP: "error"}, LIMIT, (0.0, 0, 0.95, "container limit")),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_of_a_system(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, limit, said = SYSTEMS[system]
    monkeypatch.setattr(limits, "read", files.get)
    monkeypatch.setattr(limits, "binding_limit", lambda: limit)
    found = memory_pressure()
    assert (found.stalled_ratio, found.swapped_bytes, found.used_ratio, found.whose) == (
        pytest.approx(said[0]), said[1], pytest.approx(said[2]), said[3],
    )  # fmt: skip


def test_of_this_one() -> None:
    found = memory_pressure()
    assert isinstance(found, MemoryPressure)
    assert 0 <= found.stalled_ratio <= 1
    assert 0 <= found.used_ratio <= 1
