"""A kernel of a test leaves no process behind, whether it is stopped, restarted or never came up."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.kernel import kernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START = """
import subprocess
[subprocess.Popen(["sleep", "600"], start_new_session=is_session).pid for is_session in (False, True)]
"""


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_processes_that_a_cell_started_end_with_the_kernel(start_kernel: Callable[[str], kernels.Kernel]) -> None:
    kernel = start_kernel("modern")
    with pytest.raises(TimeoutError):
        kernel.listen(lambda message: False, timeout_s=0.1)
    started = ast.literal_eval(kernel.run(START).value or "")
    assert running(started) == started
    kernel.stop()
    kernels.wait_until(lambda: not running(started), 5, "the processes did not end")
    kernel.stop()  # a second time is harmless


def test_a_kernel_that_does_not_come_up_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "START_S", 0.5)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $$ > pid\nexec sleep 600\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="Kernel didn't respond"):
        kernels.Kernel(str(program), tmp_path)
    pid = int((tmp_path / "pid").read_text())
    kernels.wait_until(lambda: not running([pid]), 5, "the kernel did not end")
