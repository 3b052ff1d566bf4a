"""A kernel that is killed tells of it when it is back; one that was restarted has nothing to tell."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernel.kernels import Kernel

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


@pytest.fixture(scope="module", params=stacks.STACKS)
def mortal(request: pytest.FixtureRequest, start_kernel: Callable[[str], Kernel]) -> Kernel:
    """A kernel of this module's own."""
    return start_kernel(request.param)


def boxes(kernel: Kernel) -> list[Path]:
    """Of this kernel alone: others may lie in the same folder."""
    file = Path(kernel.manager.connection_file)
    name = hashlib.sha256(file.name.encode()).hexdigest()[:16]
    return list(file.parent.glob(f"torchdebug-{name}.blackbox"))


@pytest.mark.parametrize("gauge", ["%%memgauge", "%memgauge on\n", "%%memtrace"], ids=["a cell", "lasting", "a trace"])
def test_the_next_kernel_says_where_and_with_how_much_it_died(mortal: Kernel, gauge: str) -> None:
    mortal.restart()
    mortal.run(LOAD)
    mortal.run(LITTLE)
    if gauge.endswith("\n"):
        mortal.run(gauge)
        gauge = ""
    number = mortal.run(FILL.strip()).count
    mortal.kill(f"{gauge}\n\nfill(290)", "full")
    said = mortal.run(LOAD).stdout
    assert re.fullmatch(
        rf"The kernel before this one died in In\[{number}\] line [5-8] with .* of .* \(MEM_LIMIT of this server\), growing .*iB a second\.\n",  # noqa: E501
        said,
    )
    assert mortal.run("%reload_ext torchdebug_magics").stdout == ""
    assert boxes(mortal) == []


def test_a_restart_is_no_news(mortal: Kernel) -> None:
    for code in ("%memgauge on", "%%memgauge\nimport time\ntime.sleep(0.5)"):
        mortal.run(LOAD)
        mortal.run(code)
        mortal.restart()
        assert mortal.run(LOAD).stdout == ""
        assert boxes(mortal) == []


def test_a_restart_in_the_middle_of_a_cell_is_no_news(mortal: Kernel) -> None:
    mortal.run(LOAD)
    mortal.client.execute("%%memgauge\nimport time\nprint('begun', flush=True)\ntime.sleep(60)")
    while mortal.client.get_iopub_msg(timeout=60)["content"].get("text", "").strip() != "begun":
        pass
    mortal.manager.interrupt_kernel()  # as a server does first
    mortal.restart()
    assert mortal.run(LOAD).stdout == ""


def test_an_open_gauge_writes_and_the_last_to_end_removes(mortal: Kernel) -> None:
    mortal.run(LOAD)
    mortal.run("%memgauge on")
    mortal.run("%%memgauge -q\n1")
    assert len(boxes(mortal)) == 1
    mortal.run("%memgauge off")
    assert boxes(mortal) == []
