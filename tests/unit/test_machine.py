from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from torchdebug_magics import machine

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(GIB)}, "1.0 GiB (container limit)"),
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/memory.max": str(GIB)}, "1.0 GiB (container limit)"),
        (
            {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n", "sys/fs/cgroup/job/memory.max": str(GIB)},
            "1.0 GiB (container limit)",
        ),
        ({"proc/self/cgroup": "4:cpu,memory:/a\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB)}, "1.0 GiB (container limit)"),
        (
            {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
            "9.0 GiB (the whole machine)",
        ),
        ({}, "9.0 GiB (the whole machine)"),
    ],
)
def test_the_tightest_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine, "_host", lambda: iter([(9 * GIB, "the whole machine")]))
    monkeypatch.setattr(machine, "_process", lambda: iter([]))
    assert machine.memory_limit(tmp_path) == said


def test_this_machine_has_one() -> None:
    assert "B (" in machine.memory_limit()


def test_versions_come_from_metadata() -> None:
    assert machine.versions().startswith(f"Python {sys.version.split()[0]}, torch ")


def test_the_device_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine, "_version", lambda _: "2.13.0+cpu")
    assert machine.device() == "CPU: torch 2.13.0+cpu is built without CUDA"
    monkeypatch.setattr(machine, "_version", lambda _: "2.13.0")
    monkeypatch.setattr(machine, "_nvidia", lambda: "A, 80.0 GiB (driver 1)")
    assert machine.device() == "A, 80.0 GiB (driver 1)"
    monkeypatch.setattr(machine, "_nvidia", lambda: "")
    assert "lists no GPU" in machine.device()
    monkeypatch.setattr(machine, "_nvidia", lambda: 1 / 0)
    assert machine.device() == "CPU: no NVIDIA driver to be seen (division by zero)"
