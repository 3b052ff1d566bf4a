"""A killed kernel is accounted for when the next one loads the extension; one that was restarted leaves nothing to say."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import stacks
from tests.kernel.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOAD = "%load_ext torchdebug_magics"
# A limit that the cell nearly reaches, whatever the machine has.
LITTLE = """
import os, time
from torchdebug_magics.machine.process import rss_bytes
os.environ["MEM_LIMIT"] = str(rss_bytes() + (300 << 20))
"""
FILL = """
def fill(mib):
    kept = []
    for _ in range(mib // 5):
        kept.append(b"x" * (5 << 20))
        time.sleep(0.02)
    print("full", flush=True)
    while True:
        time.sleep(0.01)
"""
HANGS = "import threading\nlock = threading.Lock()\nlock.acquire()\nprint('begun', flush=True)\nlock.acquire()"


@pytest.fixture(scope="module")
def mortal_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that the tests of this module kill and restart."""
    with Kernel(stacks.python("modern"), tmp_path_factory.mktemp("mortal")) as kernel:
        yield kernel


@pytest.fixture
def mortal(mortal_kernel: Kernel) -> Kernel:
    """That kernel with the extension loaded, whatever the test before has left."""
    assert mortal_kernel.run(LOAD).status == "ok"
    return mortal_kernel


def boxes(kernel: Kernel) -> list[Path]:
    """The files of this kernel alone: others may lie in the same folder."""
    file = Path(kernel.manager.connection_file)
    name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
    return list(file.parent.glob(f"torchdebug-{name}.blackbox"))


def check_death_of_memory(kernel: Kernel, line: str, cell_magic: str) -> None:
    kernel.run(LITTLE)
    kernel.run(line)
    number = kernel.run(FILL.strip()).count
    kernel.kill(f"{cell_magic}\n\nfill(290)", "full")
    assert re.fullmatch(
        rf"The kernel before this one died in In\[{number}\] line [5-8] with .* of .* \(MEM_LIMIT of this server\), growing .*iB a second\.\n",  # noqa: E501
        kernel.run(LOAD).stdout,
    )
    assert kernel.run("%reload_ext torchdebug_magics").stdout == ""
    assert boxes(kernel) == []


def check_death_in_a_hang(kernel: Kernel, cell: str) -> None:
    count = kernel.kill(cell, "begun", after_s=2.5)
    line = cell.count("\n") + 1
    message = kernel.run(LOAD).stdout
    assert re.fullmatch(
        rf"The kernel before this one was ended while it hung in In\[{count}\] line {line}\. "
        rf"Stuck for [\d.]+ s: the main thread waits for a lock that it holds itself · In\[{count}\] line {line}: `lock\.acquire\(\)`\.?\n",
        message,
    ), message
    assert kernel.run("%reload_ext torchdebug_magics").stdout == ""


@pytest.mark.parametrize(("line", "cell_magic"), [("%memgauge on", ""), ("", "%%memtrace")], ids=["lasting", "a trace"])
def test_the_next_kernel_says_where_and_with_how_much_it_died(mortal: Kernel, line: str, cell_magic: str) -> None:
    check_death_of_memory(mortal, line, cell_magic)


def test_the_next_kernel_says_where_the_last_one_hung_and_why(mortal: Kernel) -> None:
    mortal.run("%hangwatch on --after 0.6")
    check_death_in_a_hang(mortal, HANGS)


def test_on_colab_both_are_said_of_a_gauge_and_a_watch_over_one_cell(start_kernel: Callable[[str], Kernel]) -> None:
    kernel = start_kernel("colab")
    kernel.run(LOAD)
    check_death_of_memory(kernel, "", "%%memgauge")
    check_death_in_a_hang(kernel, f"%%hangwatch --after 0.6\n{HANGS}")


def test_a_kernel_that_was_killed_while_all_was_well_says_nothing_of_a_hang(mortal: Kernel) -> None:
    mortal.kill("%%hangwatch\nimport time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.01)", "begun", after_s=1)
    assert "hung" not in mortal.run(LOAD).stdout


def test_a_restart_is_no_news(mortal: Kernel) -> None:
    mortal.run("%memgauge on")
    mortal.run("%%memgauge\nimport time\ntime.sleep(0.5)")
    mortal.restart()
    assert mortal.run(LOAD).stdout == ""
    assert boxes(mortal) == []


def test_a_restart_in_the_middle_of_a_cell_is_no_news(mortal: Kernel) -> None:
    mortal.client.execute("%%memgauge\nimport time\nprint('begun', flush=True)\ntime.sleep(60)")
    mortal.listen(lambda message: message["content"].get("text", "").strip() == "begun")
    mortal.manager.interrupt_kernel()  # as a server does first
    mortal.restart()
    assert mortal.run(LOAD).stdout == ""


def test_an_open_gauge_writes_and_the_last_to_end_removes(mortal: Kernel) -> None:
    mortal.run("%memgauge on")
    mortal.run("%%memgauge -q\n1")
    assert len(boxes(mortal)) == 1
    mortal.run("%memgauge off")
    assert boxes(mortal) == []
