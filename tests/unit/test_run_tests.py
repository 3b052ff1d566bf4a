"""A run of the tests ends in time, leaves no process, and repeats only what waits for other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests import children
from tests.summary import ONLY_WAITING_FAILED

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.waits

# The environment of a process says which run it belongs to, also when its parent has ended.
MARK = "TORCHDEBUG_RUN_UNDER_TEST"
CONFIG = """[tool.pytest.ini_options]
markers = ['waits', 'thorough', 'gpu', 'keeps_rng']
addopts = ['--strict-markers', '-p', 'no:cacheprovider']
"""
SLEEPS = "[sys.executable, '-c', 'import time; time.sleep(600)']"
LEAVES_A_CHILD = f"""
import subprocess, sys

def test_leaves_a_child():
    subprocess.Popen({SLEEPS})

def test_is_not_touched_by_it():
    pass
"""
LEAVES_AN_ORPHAN = f"""
import subprocess, sys

def test_leaves_an_orphan():
    starts = "import subprocess, sys; subprocess.Popen({SLEEPS}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", starts], check=True)
"""
HANGS = f"""
import signal, subprocess, sys

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGALRM])  # as a library that waits with the GIL held
    subprocess.run({SLEEPS}, start_new_session=True)
"""
WAITS = """
from pathlib import Path
import pytest

ROOT = Path(__file__).parent

@pytest.mark.waits
def test_waits():
    if not (ROOT / "ran.txt").exists():
        (ROOT / "ran.txt").touch()
        pytest.fail("the machine was busy")

def test_does_not_wait():
    assert not (ROOT / "fails.txt").exists()
"""


def run(
    pytester: pytest.Pytester, root: Path, tests: str, *, limit_s: float = 60.0, config: str = CONFIG
) -> subprocess.CompletedProcess[str]:
    """The end of a run over one file of tests, of which no process is left."""
    pytester.makeconftest((root / "tests/conftest.py").read_text())
    pytester.makepyprojecttoml(config)
    pytester.makepyfile(test_planted=tests)
    command = [sys.executable, str(root / "tools/run_tests.py"), str(limit_s), "test_planted.py"]
    mark = str(pytester.path)
    ended = subprocess.run(
        command, cwd=pytester.path, env={**os.environ, MARK: mark}, capture_output=True, text=True, check=False, timeout=100
    )
    assert children.marked_processes(MARK, mark) == []
    return ended


def test_a_process_that_a_test_leaves_is_killed_and_fails_the_test(pytester: pytest.Pytester, root: Path) -> None:
    orphan = LEAVES_AN_ORPHAN if sys.platform == "linux" else ""
    ended = run(pytester, root, LEAVES_A_CHILD + orphan)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    errors = 1 + bool(orphan)
    assert ended.stdout.count("a process still runs: ") >= errors
    assert "time.sleep(600)" in ended.stdout
    assert f"{errors} error" in ended.stdout


def test_a_run_that_hangs_is_killed_with_all_that_it_has_started(pytester: pytest.Pytester, root: Path) -> None:
    begin = time.monotonic()
    ended = run(pytester, root, HANGS, limit_s=8.0)
    assert ended.returncode != 0
    assert "did not end within" in ended.stdout
    assert time.monotonic() - begin < 60


def sleeps(process: psutil.Process) -> bool:
    try:
        return "time.sleep(600)" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended since it was listed
        return False


def test_a_run_that_is_terminated_takes_its_tests_with_it(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makeconftest((root / "tests/conftest.py").read_text())
    pytester.makepyprojecttoml(CONFIG)
    pytester.makepyfile(test_planted=HANGS)
    command = (sys.executable, str(root / "tools/run_tests.py"), "100", "test_planted.py")
    with children.launched(command, cwd=pytester.path, envs=({MARK: str(pytester.path)},)) as (ended,):
        until = time.monotonic() + 60
        while not any(map(sleeps, children.marked_processes(MARK, str(pytester.path)))):
            assert time.monotonic() < until
            time.sleep(0.1)
        ended.process.terminate()
        assert ended.ended().code == 128 + signal.SIGTERM
        assert children.marked_processes(MARK, str(pytester.path)) == []


def test_a_test_that_waits_runs_once_more(pytester: pytest.Pytester, root: Path) -> None:
    ended = run(pytester, root, WAITS, config=CONFIG.replace(", '-p', 'no:cacheprovider'", ""))
    assert ended.returncode == 0, ended.stdout
    assert "Once more, alone" in ended.stdout
    assert ended.stdout.rstrip().splitlines()[-1].count("1 passed") == 1
    assert "minutes" in ended.stdout


def test_any_other_failure_counts_at_once(pytester: pytest.Pytester, root: Path) -> None:
    (pytester.path / "fails.txt").touch()
    ended = run(pytester, root, WAITS, config=CONFIG.replace(", '-p', 'no:cacheprovider'", ""))
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED != ONLY_WAITING_FAILED
    assert "Once more" not in ended.stdout
