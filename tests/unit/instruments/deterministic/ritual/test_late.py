"""What a running process can no longer change is said, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader

import torchdebug_magics
from tests import children
from torchdebug_magics.instruments.deterministic.ritual.status import began_with, too_late
from torchdebug_magics.probing.names import Named

if TYPE_CHECKING:
    from pathlib import Path

ASK = """
from torchdebug_magics.instruments.deterministic.ritual.status import too_late
import os
os.environ['PYTHONHASHSEED'] = '5'
print(*too_late([]))
"""


@pytest.mark.parametrize(("began", "said"), [(b"HOME=/", True), (b"PYTHONHASHSEED=random", True), (b"HOME=/\0PYTHONHASHSEED=12", False)])
def test_the_hash_seed_is_the_one_that_the_interpreter_began_with(
    began: bytes, said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "environ").write_bytes(began)
    monkeypatch.setattr("torchdebug_magics.instruments.deterministic.ritual.status._ENVIRONMENT", tmp_path / "environ")
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # set later, which the interpreter does not read
    assert ("start the kernel with PYTHONHASHSEED=0" in " ".join(too_late([]))) == said


def test_an_interpreter_without_hash_randomization_has_nothing_too_late():
    assert children.python("-c", ASK, PYTHONHASHSEED="0").strip() == ""


def test_child_processes_get_the_seed():
    with torchdebug_magics.deterministic(seed=11):
        first, second = (children.python("-c", "print(hash('a'))") for _ in range(2))
    assert first == second


def test_where_the_system_does_not_tell_the_environment_of_the_start_it_is_that_of_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("torchdebug_magics.instruments.deterministic.ritual.status._ENVIRONMENT", tmp_path / "none")
    monkeypatch.setenv("PYTHONHASHSEED", "9")
    assert began_with("PYTHONHASHSEED") == "9"


def test_the_workspace_of_cublas_is_too_late_once_cuda_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "CUBLAS" not in " ".join(too_late([]))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "no longer needs it for matrix products" in " ".join(too_late([]))
        patched.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        assert "CUBLAS" not in " ".join(too_late([]))


def test_workers_that_live_on_are_named():
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
    assert "persistent_workers" not in " ".join(too_late([Named("loader", loader)]))
    list(loader)
    with torchdebug_magics.deterministic() as session:
        pass
    (said,) = (one for one in session.report.too_late if "persistent_workers" in one)
    assert said.startswith(
        "`loader in test_workers_that_live_on_are_named()` keeps its workers' seeds: they have been running since an earlier cell"
    )
    loader._iterator._shutdown_workers()
