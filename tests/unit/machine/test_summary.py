"""What the front door says of the machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchdebug_magics.machine import gpus

if TYPE_CHECKING:
    import pytest

    from tests.nvml import FakeNvml


def test_this_machine_has_a_limit():
    assert "B (" in gpus.memory_limit()


def test_versions_come_from_metadata():
    assert gpus.versions().startswith(f"Python {sys.version.split()[0]}, torch ")


def test_torch_for_the_cpu_has_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "_version", lambda _: "2.13.0+cpu")
    assert gpus.device() == "CPU: torch 2.13.0+cpu is built without CUDA"


def test_gpus_are_named_with_their_driver(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml):
    monkeypatch.setattr(gpus, "_version", lambda _: "2.13.0")
    nvml.add("NVIDIA A100", total_bytes=80 * 2**30)
    assert gpus.device() == "NVIDIA A100, 80.0 GiB (driver 570.1)"


def test_no_gpu_is_explained(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml):
    monkeypatch.setattr(gpus, "_version", lambda _: "2.13.0")
    assert "lists no GPU" in gpus.device()
    nvml.fail("nvmlInit", "Driver Not Loaded")
    assert gpus.device() == "CPU: no NVIDIA driver to be seen (Driver Not Loaded)"
