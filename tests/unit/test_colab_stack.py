"""What runs inside IPython in this process, run once more inside Colab's IPython; and how the Python for it is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import children, stacks

if TYPE_CHECKING:
    from pathlib import Path

IN_PROCESS = ("tests/unit/test_doors.py", "tests/unit/test_import_purity.py", "tests/unit/jupyter")


@pytest.mark.kernel
def test_in_process_tests_pass_there_too(root: Path) -> None:
    parts = [part for part in IN_PROCESS if (root / part).exists()]
    command = [stacks.python("colab"), "-m", "pytest", "--no-skips", "-q", "-p", "no:cacheprovider", *parts]
    code, out, err = children.run(*command, cwd=root, limit_s=150)
    assert code == 0, out[-6000:] + err[-2000:]


FAKE = """#!/bin/sh
{answer}
"""


def program(file: Path, answer: str) -> Path:
    """Writes a shell script in the place of an interpreter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(FAKE.format(answer=answer))
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("version", [f"{sys.version_info[0]}.{sys.version_info[1]}", "2.99"])
def test_the_python_of_colab_is_looked_for_until_one_runs(root: Path, tmp_path: Path, version: str) -> None:
    """pyenv puts a `python3.12` on the path that fails where that version is not selected; the version itself lies in pyenv's folder."""
    program(tmp_path / f"bin/python{version}", "echo 'pyenv: command not found' >&2; exit 127")
    installed = tmp_path / f"pyenv/versions/{version}.1/bin/python"
    program(installed, f'exec "{sys.executable}" "$@"')
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path / "pyenv")}
    command = [shutil.which("bash") or "bash", str(root / "tools/find_python.sh"), version, sys.executable]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == sys.executable
    if version == "2.99":  # what stands there answers, but is of another version
        assert ran.stderr.count("\n") == 1
        assert ran.stderr.startswith("no Python 2.99 found: the Colab-like stack runs on Python 3.")
    else:
        assert ran.stderr == ""
