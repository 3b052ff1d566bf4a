"""A machine made of files, and one with an NVIDIA driver made of a module."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import children
from tests.nvml import FakeNvml
from tests.torch_forks import TorchForks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def little_to_walk(little_to_search: None, no_other_tests: None) -> None:
    """Most instruments look for who holds what, and some put back what a step has changed."""


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


@pytest.fixture
def agents_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of the agents in processes are made: empty afterwards. The paths of sockets must be short."""
    from torchdebug_magics.ranks import launching

    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(launching, "_short_folder", lambda: folder)
        yield Path(folder)
        assert os.listdir(folder) == []  # noqa: PTH208 - names say enough


@pytest.fixture
def none_outlives() -> Iterator[None]:
    """Kills the processes of `multiprocessing` that a test has started and left running."""
    with children.none_outlives():
        yield


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[TorchForks]:
    """Runs scripts in processes that have imported torch and nothing more."""
    forks = TorchForks()
    yield forks
    forks.close()


@pytest.fixture
def until() -> Callable[..., bool]:
    """Wait until something holds; False where it does not within the time."""

    def wait(holds: Callable[[], object], limit_s: float = 20.0) -> bool:
        end_s = time.monotonic() + limit_s
        while not (found := bool(holds())) and time.monotonic() < end_s:
            time.sleep(0.01)
        return found

    return wait
