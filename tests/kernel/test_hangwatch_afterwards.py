"""The kernel after one that was killed while it hung says where and why; in a file of its own, so that both run beside each other."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernel.kernels import Kernel

LOAD = "%load_ext torchdebug_magics"


@pytest.fixture(scope="module")
def mortal(request: pytest.FixtureRequest, start_kernel: Callable[[str], Kernel]) -> Kernel:
    """A kernel of this module's own."""
    return start_kernel(request.param)


def killed_while(mortal: Kernel, code: str, *, after_s: float) -> int:
    """Run a cell that prints "begun", and kill the kernel so long after; the number of the cell."""
    pid = int(mortal.value("__import__('os').getpid()") or 0)
    mortal.client.execute(code)
    count = 0
    while True:
        message: dict[str, Any] = mortal.client.get_iopub_msg(timeout=60)
        count = message["content"].get("execution_count", count) if message["msg_type"] == "execute_input" else count
        if message["content"].get("text", "").strip() == "begun":
            break
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    mortal.restart(now=True)
    return count


HANGS = "import threading\nlock = threading.Lock()\nlock.acquire()\nprint('begun', flush=True)\nlock.acquire()"


@pytest.mark.parametrize(("mortal", "lasting"), [("modern", True), ("colab", False)], indirect=["mortal"])
def test_the_next_kernel_says_where_the_last_one_hung_and_why(mortal: Kernel, *, lasting: bool) -> None:
    mortal.run(LOAD)
    if lasting:
        mortal.run("%hangwatch on --after 0.6")
    count = killed_while(mortal, HANGS if lasting else f"%%hangwatch --after 0.6\n{HANGS}", after_s=2.5)
    line = 5 if lasting else 6
    said = mortal.run(LOAD).stdout
    assert re.fullmatch(
        rf"The kernel before this one was ended while it hung in In\[{count}\] line {line}\. "
        rf"Stuck for [\d.]+ s: the main thread waits for a lock that it holds itself · In\[{count}\] line {line}: `lock\.acquire\(\)`\.?\n",
        said,
    ), said
    assert mortal.run("%reload_ext torchdebug_magics").stdout == ""


@pytest.mark.parametrize("mortal", ["modern"], indirect=True)
def test_a_kernel_that_was_killed_while_all_was_well_says_nothing_of_a_hang(mortal: Kernel) -> None:
    mortal.run(LOAD)
    killed_while(mortal, "%%hangwatch\nprint('begun', flush=True)\nwhile True:\n    x = [0]", after_s=1)
    assert "hung" not in mortal.run(LOAD).stdout
