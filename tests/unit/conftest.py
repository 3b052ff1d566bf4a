"""A machine made of files, and one with an NVIDIA driver made of a module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.nvml import FakeNvml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def system(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes the files of a system, by their path from its root."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """In the place of pynvml; no GPU at first."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake
