"""The driver's numbers: which GPUs, whose bytes, and one line for each way in which a driver can refuse."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pynvml
import pytest

from torchdebug_magics.machine.gpus import Gpu, Gpus

if TYPE_CHECKING:
    from tests.nvml import FakeNvml

GIB = 2**30


def read(nvml: FakeNvml) -> tuple[list[str], str]:
    with Gpus() as gpus:
        names = [gpu.name for gpu in gpus.read()]
    assert nvml.opened == 0
    return names, gpus.problem


def test_a_reading(nvml: FakeNvml):
    nvml.add("NVIDIA T4", uuid="GPU-7", used_bytes=3 * GIB, total_bytes=16 * GIB, processes=[(11, GIB)])
    with Gpus() as gpus:
        (gpu,) = gpus.read()
        assert gpu == Gpu("NVIDIA T4", "GPU-7", 3 * GIB, 16 * GIB, ((11, GIB),))
        nvml.gpus[0].used_bytes = 4 * GIB
        assert gpus.read()[0].used_bytes == 4 * GIB
        assert nvml.opened == 1
    assert (gpus.problem, gpus.driver, nvml.opened) == ("", "570.1", 0)


ERRORS = [
    *("LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch", "NoPermission", "GpuIsLost", "Unknown", "NotSupported"),
    *("Uninitialized", "InsufficientPower", "Timeout", "ResetRequired", "FunctionNotFound"),
]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    "function", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"]
)
def test_each_documented_error_is_one_line(nvml: FakeNvml, name: str, function: str):
    nvml.add()
    error = getattr(pynvml, f"NVMLError_{name}")()
    nvml.failing[function] = error
    with Gpus() as gpus:
        assert gpus.read() == []
    assert str(error) in gpus.problem
    assert "\n" not in gpus.problem
    assert nvml.opened == 0


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMigMode", "nvmlShutdown"])
def test_what_is_not_needed_may_fail(nvml: FakeNvml, function: str):
    nvml.add()
    nvml.fail(function, "Insufficient Permissions")
    with Gpus() as gpus:
        assert [gpu.total_bytes for gpu in gpus.read()] == [16 * GIB]


def test_one_gpu_that_is_lost_leaves_the_others(nvml: FakeNvml):
    nvml.add("A")
    with Gpus() as gpus:
        nvml.fail("nvmlDeviceGetMemoryInfo", "GPU is lost")
        assert gpus.read() == []
        assert gpus.problem == "A cannot be read (GPU is lost)"
        nvml.works()
        assert len(gpus.read()) == 1


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Gpus() as gpus:
        assert gpus.read() == []
    assert "nvidia-ml-py is missing" in gpus.problem


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("0,1,2", ["A", "B", "C"]),
        ("2,0", ["C", "A"]),
        (" 1 ", ["B"]),
        ("GPU-bbb2", ["B"]),
        ("GPU-bbb2-22,0", ["B", "A"]),
        ("GPU-", []),  # fits all three
        ("1,7,0", ["B"]),  # CUDA stops at what means nothing
        ("1,-1,0", ["B"]),
        ("GPU-zzz,0", []),
        ("MIG-zzz", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, wanted: str, names: list[str]):
    for name, uuid in (("A", "GPU-aaa1-11"), ("B", "GPU-bbb2-22"), ("C", "GPU-ccc3-33")):
        nvml.add(name, uuid=uuid)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    found, problem = read(nvml)
    assert found == names
    assert (f"CUDA_VISIBLE_DEVICES={wanted!r}" in problem) == (not names)


def test_of_a_split_gpu_the_instance_is_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    one, two = (type(nvml.add())(f"MIG 1g.{n}", f"MIG-{n}{n}", n * GIB, 5 * GIB) for n in (1, 2))
    nvml.gpus[:] = nvml.gpus[:1]
    nvml.gpus[0].instances = [one, two]
    assert read(nvml)[0] == ["MIG 1g.1"]  # CUDA takes the first
    for wanted, name in (("MIG-22", "MIG 1g.2"), ("0", "MIG 1g.1"), (nvml.gpus[0].uuid, "MIG 1g.1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert read(nvml)[0] == [name]


OURS = os.getpid()


@pytest.mark.parametrize(
    ("processes", "others_bytes"),
    [
        ([(OURS, 3)], 0),
        ([(OURS, 3), (1, 4), (2, 5)], 9),
        ([(OURS, None), (1, None)], None),  # Windows, and MIG
        ([(OURS, None)], 0),
        ([(1, 3)], 0),  # in a container we are seen under another number: the only one is ours
        ([(1, 3), (2, 4)], None),
        ([], None),
    ],
)
def test_what_others_use(nvml: FakeNvml, processes: list[tuple[int, int | None]], others_bytes: int | None):
    nvml.add(processes=processes)
    with Gpus() as gpus:
        assert gpus.read()[0].others_bytes == others_bytes
    nvml.fail("nvmlDeviceGetComputeRunningProcesses", "No Permission")
    with Gpus() as gpus:
        assert gpus.read()[0].others_bytes is None
