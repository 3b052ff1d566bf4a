"""Runs pytest under one time limit, and once more, alone, what waits for other processes: ``run_tests.py LIMIT_S PYTEST-ARGUMENTS``.

Whatever happens, no process of the run is left: at the limit, or at the end, all that it has started is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import processes
from tests.summary import ONLY_WAITING_FAILED, WAITS

WORKERS = "3"
"""One more than cores: what drives kernels, browsers and ranks waits for a third of its time."""
TIMED_OUT = 124
INTERRUPTED_S = 30.0
"""The time to end after an interrupt."""


def compiled_once() -> dict[str, str]:
    """The environment, in which Python keeps what it has compiled: else each worker, kernel and rank compiles all that it imports."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def pytest_within(until: float, *arguments: str) -> int:
    """The exit status of pytest; at `until`, by the monotonic clock, it is killed with all that it has started."""
    run = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=compiled_once(), start_new_session=True)
    try:
        return run.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    except KeyboardInterrupt:
        run.send_signal(signal.SIGINT)  # the terminal's reaches no other session; pytest then prints what it has
        with suppress(subprocess.TimeoutExpired):
            run.wait(INTERRUPTED_S)
        return pytest.ExitCode.INTERRUPTED
    finally:
        processes.kill(run.pid)
        run.wait()


def main(limit_s: float, *arguments: str) -> int:
    """The exit status of the last run of pytest; 1 where a process was left."""
    processes.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):  # else nothing would be killed where this is
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    until = time.monotonic() + limit_s
    status = pytest_within(until, "--no-skips", "--numprocesses", WORKERS, *arguments)
    left = processes.kill_left(processes.running_children())
    if status == ONLY_WAITING_FAILED and not left:
        print("\nWhat failed waits for other processes, and others may have kept those from running. Once more, alone:", flush=True)
        status = pytest_within(until, "--no-skips", "--last-failed", "--last-failed-no-failures", "none", "-m", WAITS, *arguments)
        left = processes.kill_left(processes.running_children())
    if status == TIMED_OUT:
        print(f"\nThe tests did not end within {limit_s / 60:.0f} minutes and were killed.", flush=True)
    if left:
        print(f"\nThe tests left processes, which were killed: {', '.join(left)}", flush=True)
    return status or bool(left)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
