"""What runs inside IPython in this process, run once more inside Colab's IPython."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests import stacks

if TYPE_CHECKING:
    from pathlib import Path

IN_PROCESS = ("tests/unit/test_doors.py", "tests/unit/test_import_purity.py", "tests/unit/jupyter")


@pytest.mark.kernel
def test_in_process_tests_pass_there_too(root: Path) -> None:
    parts = [part for part in IN_PROCESS if (root / part).exists()]
    command = [stacks.python("colab"), "-m", "pytest", "--no-skips", "-q", "-p", "no:cacheprovider", *parts]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=290)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
