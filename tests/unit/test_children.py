"""Children that tests launch end with their block, wherever their own children have moved to, and say why they ended badly."""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests import children

if TYPE_CHECKING:
    from tests.torch_forks import TorchForks

pytestmark = pytest.mark.waits

PYTHON = (sys.executable, "-S", "-c")
LEAVES_A_DAEMON = """
import os, time
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        print("pid", os.getpid(), flush=True)
        os.close(writer)
        time.sleep(60)
    os._exit(0)
os.close(writer)
os.read(reader, 1)
"""


def test_what_a_command_has_started_ends_with_the_block() -> None:
    with children.launched((*PYTHON, LEAVES_A_DAEMON)) as (child,):
        pid = int(child.wait_for("pid "))
        assert child.check().code == 0
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_does_not_end_is_killed_and_its_output_shown() -> None:
    with pytest.raises(AssertionError, match=r"did not end in time; its output:\nso far"):
        children.run(*PYTHON, "import time; print('so far', flush=True); time.sleep(60)", limit_s=1)


def test_a_line_that_does_not_come_is_waited_for_only_so_long() -> None:
    with children.launched((*PYTHON, "import time; print('half', end='', flush=True); time.sleep(60)")) as (child,):
        began_s = time.monotonic()
        with pytest.raises(AssertionError, match="did not print 'half'"):
            child.wait_for("half", limit_s=0.3)
        assert time.monotonic() - began_s < 20


def test_a_bad_exit_shows_the_error() -> None:
    with pytest.raises(AssertionError, match=r"exit code 1; its output:\n[^$]*ValueError: bad label"):
        children.python("-S", "-c", "raise ValueError('bad label')")


def start_another() -> None:
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    other.start()
    other.join()


def test_processes_end_with_their_descendants() -> None:
    process = multiprocessing.get_context("fork").Process(target=start_another)
    with pytest.raises(AssertionError, match="did not end within"), children.none_outlives():  # noqa: PT012 - what is left is the point
        process.start()
        while not (descendants := psutil.Process(process.pid).children()):
            time.sleep(0.01)
        children.join(process, limit_s=0.1)
    assert not process.is_alive()
    assert not descendants[0].is_running() or descendants[0].status() == psutil.STATUS_ZOMBIE


def test_a_script_that_hangs_ends_the_server_and_the_next_has_another(torch_forks: TorchForks) -> None:
    assert torch_forks.check("import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)") == "True False\n"
    code, _, err = torch_forks.run("raise ValueError('bad label')")
    assert (code, err.endswith("ValueError: bad label\n")) == (1, True)
    with pytest.raises(AssertionError, match="did not print"):
        torch_forks.run("import time; time.sleep(60)", limit_s=0.3)
    assert torch_forks.check("print(1)") == "1\n"
