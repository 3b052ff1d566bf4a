"""What a device's own allocator counts, beside what was followed; its counters are read, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import torchdebug_magics
from torchdebug_magics.html import plain
from torchdebug_magics.instruments.memtrace.view import page
from torchdebug_magics.memory import gauges
from torchdebug_magics.memory.gauges import Allocator

MIB = 2**20
BEFORE = Allocator(0, "GPU 0 · NVIDIA T4", "a", 5 * MIB, 20 * MIB, 1000 * MIB, peak_bytes=50 * MIB, peak_reserved_bytes=60 * MIB)
AFTER = replace(BEFORE, allocated_bytes=7 * MIB, peak_bytes=80 * MIB)


def traced(monkeypatch: pytest.MonkeyPatch, before: list[Allocator], after: list[Allocator]) -> Any:
    def never(*_: object) -> None:
        raise AssertionError("a counter was reset")

    now = before
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, never)
    monkeypatch.setattr(gauges.Allocators, "read", lambda _: now)
    with torchdebug_magics.memtrace() as session:
        now = after
        kept = torch.zeros(3)
    assert len(kept) == 3
    return session.report


def test_a_counter_that_rose_in_the_cell_is_its_peak_and_one_that_did_not_is_unknown(monkeypatch: pytest.MonkeyPatch):
    report = traced(monkeypatch, [BEFORE], [AFTER])
    gpu = next(one for one in report.devices if one.device == "cuda:0")
    assert (gpu.allocated_bytes, gpu.allocated_peak_bytes) == (7 * MIB, 80 * MIB)
    assert (gpu.reserved_bytes, gpu.reserved_peak_bytes) == (20 * MIB, None)
    assert (gpu.net_bytes, gpu.peak_bytes) == (0, 0)
    said = plain.render(page(report))
    assert "MA 7.0 MiB (peak 80.0 MiB), CA 20.0 MiB (the peak is from before the cell)" in " ".join(said.split())


def test_a_device_that_is_first_used_in_the_cell_has_its_whole_peak_there(monkeypatch: pytest.MonkeyPatch):
    report = traced(monkeypatch, [], [AFTER])
    gpu = next(one for one in report.devices if one.device == "cuda:0")
    assert (gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) == (80 * MIB, 60 * MIB)


def test_the_cpu_has_no_allocator_that_counts():
    with torchdebug_magics.memtrace() as session:
        kept = torch.zeros(1 << 18)
    (cpu,) = session.report.devices
    assert (cpu.device, cpu.net_bytes, cpu.allocated_bytes, cpu.reserved_bytes) == ("cpu", MIB, None, None)
    assert cpu.peak_bytes >= MIB
    assert kept.numel() == 1 << 18


@pytest.mark.parametrize(("label", "name"), [("GPU 1 · A100", "cuda:1"), ("XPU 1 · Max", "xpu:1"), ("MPS", "mps:1")])
def test_a_device_is_called_as_torch_calls_it(label: str, name: str):
    assert replace(BEFORE, number=1, label=label).device == name
