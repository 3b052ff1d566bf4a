"""`%pip install` in a kernel that runs, then `%load_ext`: what is installed stays, what is loaded stays, and nothing asks for a restart."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import stacks
from tests.kernel.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOADED = """
import sys, torch, matplotlib, numpy, psutil, IPython, ipykernel, ipywidgets
net = torch.nn.Linear(4, 2)
before = {name: id(module) for name, module in sys.modules.items() if not name.startswith("_")}
"""
BAD_STEP = """%%nanhunt -o hunt
loss = (net(torch.ones(2, 4)) - 100).log().sum()
loss.backward()
"""


@pytest.fixture
def without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A kernel without this package, on Colab's stack, where people install it into a running kernel."""
    stack, environment = stacks.python("colab"), tmp_path / "environment"
    subprocess.run([stack, "-m", "venv", "--without-pip", str(environment)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        for python in (stack, environment / "bin/python")
    )
    # The folder is searched, but its .pth files, one of which leads to this checkout, are not read.
    (tmp_path / ours / "stack.pth").write_text(theirs)
    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "work").mkdir()
    with Kernel(str(environment / "bin/python"), tmp_path / "work") as kernel:
        yield kernel


def test_installed_while_the_kernel_runs_it_loads_and_works(without_us: Kernel, root: Path) -> None:
    kernel = without_us
    assert kernel.run(LOADED, timeout_s=120).status == "ok"
    assert kernel.run("%load_ext torchdebug_magics").ename == "ModuleNotFoundError"
    # Without an index pip can take nothing from anywhere: each requirement is met by what is there.
    installed = kernel.run(f"%pip install --no-index --no-build-isolation --no-compile {root}", timeout_s=200)
    assert "Successfully installed torchdebug-magics" in installed.stdout, installed.text
    loading = kernel.run("%load_ext torchdebug_magics")
    assert (loading.status, loading.outputs) == ("ok", [])
    assert "/environment/" in str(kernel.value("sys.modules['torchdebug_magics'].__file__"))

    assert kernel.run(BAD_STEP, timeout_s=120).ename == "NonFiniteError"
    assert kernel.value("(hunt.finding.location.line, hunt.finding.op)") == "(2, 'log')"
    assert kernel.run("%shapes -o sizes net torch.ones(3, 4)", timeout_s=120).status == "ok"
    assert kernel.value("sizes.verdict") not in {None, ""}
    assert kernel.value("[name for name, one in before.items() if id(sys.modules.get(name)) != one]") == "[]"
