"""Every memory that a cell can run out of, on machines with and without GPUs; torch's counters stand in for a device."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import children
from torchdebug_magics.machine.limits import Limit
from torchdebug_magics.machine.process import Worker
from torchdebug_magics.memory import gauges
from torchdebug_magics.memory.gauges import Gauges
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.report import Gauge

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.nvml import FakeNvml

    UseCuda = Callable[..., None]

GIB = 2**30
OURS = os.getpid()


@pytest.fixture
def use_cuda(monkeypatch: pytest.MonkeyPatch) -> UseCuda:
    """As if torch were built for CUDA and had used some devices: (uuid, allocated, reserved) each."""

    def use(*devices: tuple[str, int, int], initialized: bool = True) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        known = [SimpleNamespace(name=f"NVIDIA {uuid}", uuid=uuid, total_memory=16 * GIB) for uuid, _, _ in devices]
        monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda at: stats(*devices[at][1:]))

    return use


def stats(allocated: int, reserved: int) -> dict[str, Any]:
    return {"allocated_bytes": {"all": {"current": allocated}}, "reserved_bytes": {"all": {"current": reserved}}}


def read() -> tuple[Gauge, ...]:
    with Gauges() as gauges:
        return gauges.read()


def gpu_gauges() -> list[Gauge]:
    return [gauge for gauge in read() if gauge.label.startswith(("GPU", "XPU"))]


def test_without_a_gpu_one_line_says_so():
    first, limit, gpu, *others = read()
    assert first.label == "this process (RSS)"
    assert first.limit_bytes == limit.limit_bytes
    assert 0 < first.used_bytes < (limit.limit_bytes or 0)
    if torch.cuda.is_available():
        assert all(gauge.label.startswith("GPU") and gauge.limit_bytes for gauge in (gpu, *others))
        return
    alone = f"none: torch {torch.__version__} is built for the CPU alone"
    assert gpu.note == alone if torch.version.cuda is None else gpu.note.startswith("no NVIDIA driver to be seen")
    assert gpu == Gauge("GPU", 0, None, note=gpu.note)


def test_without_a_driver_its_words_are_given(nvml: FakeNvml, use_cuda: UseCuda):
    use_cuda(initialized=False)
    nvml.fail("nvmlInit", "Driver Not Loaded")
    assert gpu_gauges() == [Gauge("GPU", 0, None, note="no NVIDIA driver to be seen (Driver Not Loaded)")]


def test_a_gpu_that_this_process_does_not_use(nvml: FakeNvml, use_cuda: UseCuda):
    use_cuda(initialized=False)
    nvml.add(used_bytes=3 * GIB, processes=[(1, 2 * GIB)])
    (gauge,) = gpu_gauges()
    assert (gauge.label, gauge.used_bytes, gauge.limit_bytes, gauge.parts) == ("GPU 0 · NVIDIA T4", 3 * GIB, 16 * GIB, ())
    assert gauge.note == "all processes; CUDA is not used here so far"


def test_a_gpu_in_use_is_taken_apart(nvml: FakeNvml, use_cuda: UseCuda):
    nvml.add(used_bytes=9 * GIB, processes=[(OURS, 6 * GIB), (1, 2 * GIB)], uuid="GPU-a")
    use_cuda(("a", 4 * GIB, 5 * GIB))
    (gauge,) = gpu_gauges()
    assert gauge.parts == (
        ("allocated", 4 * GIB),
        ("reserved beyond that", GIB),
        ("unaccounted (context, NCCL)", 2 * GIB),
        ("other processes", 2 * GIB),
    )
    assert sum(size for _, size in gauge.parts) == gauge.used_bytes


@pytest.mark.parametrize("processes", [[(OURS, None), (1, None)], [(1, GIB), (2, GIB)]], ids=["WDDM or MIG", "container"])
def test_what_cannot_be_told_apart_is_said_so(nvml: FakeNvml, use_cuda: UseCuda, processes: list[Any]):
    nvml.add(used_bytes=9 * GIB, processes=processes, uuid="GPU-a")
    use_cuda(("a", 4 * GIB, 5 * GIB))
    (gauge,) = gpu_gauges()
    assert gauge.parts[-1] == ("unaccounted (context, NCCL, other processes)", 4 * GIB)


def test_gpus_are_matched_by_their_identity_not_their_number(nvml: FakeNvml, use_cuda: UseCuda):
    nvml.add("slow", uuid="GPU-aaaa", used_bytes=GIB)
    nvml.add("fast", uuid="GPU-bbbb", used_bytes=8 * GIB)
    use_cuda(("bbbb", 7 * GIB, 8 * GIB), ("aaaa", 0, 0))  # CUDA counts the fastest first
    first, second = gpu_gauges()
    assert (first.label, first.used_bytes, first.parts[0]) == ("GPU 0 · NVIDIA bbbb", 8 * GIB, ("allocated", 7 * GIB))
    assert (second.label, second.used_bytes, second.parts[0]) == ("GPU 1 · NVIDIA aaaa", GIB, ("allocated", 0))


def test_where_the_driver_does_not_answer_the_allocator_still_does(nvml: FakeNvml, use_cuda: UseCuda):
    nvml.fail("nvmlInit", "Driver/library version mismatch")
    use_cuda(("a", 4 * GIB, 5 * GIB))
    (gauge,) = gpu_gauges()
    assert (gauge.used_bytes, gauge.limit_bytes) == (5 * GIB, 16 * GIB)
    assert gauge.parts == (("allocated", 4 * GIB), ("reserved beyond that", GIB))
    assert "version mismatch" in gauge.note


def test_an_intel_device(monkeypatch: pytest.MonkeyPatch):
    known = SimpleNamespace(name="Max 1550", total_memory=GIB)
    fakes = {
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda _: known,
        "memory_allocated": lambda _: 5,
        "memory_reserved": lambda _: 7,
        "max_memory_allocated": lambda _: 9,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.xpu, name, fake)
    gauge = next(gauge for gauge in gpu_gauges() if gauge.label.startswith("XPU"))
    assert gauge == Gauge("XPU 0 · Max 1550", 7, GIB, (("allocated", 5), ("reserved beyond that", 2)))


def test_the_cache_that_is_dropped_first_is_not_on_the_gauge(monkeypatch: pytest.MonkeyPatch):
    with Gauges() as open_gauges:
        monkeypatch.setattr(open_gauges._limits, "all", lambda: [Limit(4 * GIB, 3 * GIB, GIB, "container limit")])
        _, limit, _ = open_gauges.read()
    assert limit == Gauge("container limit", GIB, 4 * GIB, note="and 2.0 GiB of file cache, dropped when needed")


def test_workers_are_summed_by_their_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gauges, "workers", lambda: (Worker(1, 300, 100), Worker(2, 200, 50)))
    found = read()[1]
    assert (found.label, found.used_bytes, found.note) == ("2 workers (PSS)", 500, "150 B would be freed if they ended")


@pytest.mark.parametrize(
    ("place", "lost"),
    [("torchdebug_magics.memory.gauges.rss_bytes", "this process (RSS)"), ("torchdebug_magics.machine.gpus.Gpus.read", "GPU")],
)
def test_what_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch, place: str, lost: str):
    def fails(*_: object) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(place, fails)
    guard = Guard()
    with Gauges(guard) as open_gauges:
        labels = [gauge.label for gauge in open_gauges.read()]
    assert labels
    assert lost not in labels
    (problem,) = guard.problems
    assert problem.endswith("failed: OSError: gone")


def test_torch_is_left_alone_while_the_user_imports_it(monkeypatch: pytest.MonkeyPatch):
    half = ModuleType("torch")
    half.__spec__ = SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch", half)
    guard = Guard()
    with Gauges(guard) as open_gauges:
        assert open_gauges.allocators() == []
        assert len(open_gauges.read()) == 3
    assert guard.problems == []


def test_torch_is_not_imported_for_a_gauge_of_it():
    code = (
        "import sys\nfrom torchdebug_magics.machine.process import rss_bytes\nfrom torchdebug_magics.memory.gauges import Gauges\n"
        "with Gauges() as gauges: assert len(gauges.read()) >= 2\nassert 'torch' not in sys.modules"
    )
    children.python("-c", code)
