"""Gauges in a real kernel: over one cell, over many, and the guard that keeps the kernel alive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import is_end, on_both_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.kernel.kernels import Kernel, Message, Ran

# Memory that comes from the system and goes back to it, whatever the cells before have left in the allocator's hands.
TAKE = """
import mmap, os, time
def take(mib):
    kept.append(taken := mmap.mmap(-1, mib << 20))
    for at in range(0, mib << 20, 4096):
        taken[at] = 1
"""
# Half a GiB more than what is used, whatever the machine has.
LITTLE = """
import os, time
from torchdebug_magics.machine.process import rss_bytes
os.environ["MEM_LIMIT"] = str(rss_bytes() + (512 << 20))
share = f"{100 * (rss_bytes() + (150 << 20)) / int(os.environ['MEM_LIMIT']):.2f}%"
"""
ALLOCATE = """
kept = []
for _ in range(100):
    take(5)
    time.sleep(0.02)
"""
ASLEEP = "kept = []\ntake(200)\ntime.sleep(30)"
WAIT = "kept = []\nfor _ in range(12):\n    time.sleep(0.1)\n    take(4)"
# Until the test has seen enough: how much must be taken for another number depends on how much the kernel has already.
GROW = """
kept = []
while not os.path.exists("seen") and len(kept) < 100:
    time.sleep(0.1)
    take(10)
"""


@pytest.fixture
def kernel(kernel: Kernel) -> Iterator[Kernel]:
    """Without what a test before may have left on."""
    kernel.run(TAKE)
    yield kernel
    kernel.run("kept = None\n%memgauge off")


@pytest.fixture
def little(kernel: Kernel) -> Iterator[Kernel]:
    kernel.run(LITTLE)
    yield kernel
    kernel.run("os.environ.pop('MEM_LIMIT', None)")


def share(kernel: Kernel) -> str:
    return (kernel.value("share") or "").strip("'")


def pages(ran: Ran) -> list[str]:
    return [bundle["text/plain"] for bundle in ran.displays if bundle.get("text/plain")]


def everything_during(kernel: Kernel, code: str, seen: Path) -> tuple[str, list[Message]]:
    """What the front end is sent while a cell runs, whichever cell it belongs to; `seen` is made once two updates differ."""
    sent, texts = kernel.client.execute(code), set()

    def is_over(message: Message) -> bool:
        if message["msg_type"] == "update_display_data":
            texts.add(message["content"]["data"]["text/plain"])
            if len(texts) == 2:
                seen.touch()
        return is_end(message)

    messages = kernel.listen(is_over)
    kernel.client.get_shell_msg(timeout=60)
    return sent, messages


@on_both_stacks
def test_gauges_move_and_then_the_peak_stays(kernel: Kernel) -> None:
    ran = kernel.run(f"%%memgauge -o gauge\n{WAIT}")
    assert ran.status == "ok"
    (page,) = pages(ran)
    assert ", peak " in page
    assert " left" in page
    assert "this process (RSS)" in page
    assert kernel.value("gauge.rss_peak_bytes >= gauge.rss_start_bytes") == "True"
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'torchdebug' in t.name]") == "[]"


@on_both_stacks
@pytest.mark.parametrize("body", [ALLOCATE, ASLEEP], ids=["a loop", "asleep"])
def test_the_guard_saves_the_kernel_and_the_variables(little: Kernel, body: str) -> None:
    ran = little.run(f"%%memgauge --guard {share(little)}\n{body}")
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert ran.took_s < 20
    assert any("Stopped by guard at" in page and "MEM_LIMIT of this server" in page for page in pages(ran))
    assert little.value("0 < len(kept) < 90") == "True"
    assert little.run("1 + 1").value == "2"


def test_of_an_interrupt_by_the_guard_only_the_users_own_lines_are_shown(little: Kernel) -> None:
    little.run("import torch\nnet = torch.nn.Sequential(torch.nn.Linear(2048, 2048))\nkept = []")
    little.run(LITTLE)  # anew: torch itself takes more than the guard leaves
    ran = little.run(f"%%memgauge --guard {share(little)}\nwhile True:\n    kept.append(net(torch.ones(512, 2048)))")
    first, *calls, last = ran.traceback.splitlines()
    assert first == "Traceback of your own code (most recent call last):", ran.traceback
    assert len(calls) == 1
    assert calls[0].endswith("line 3: kept.append(net(torch.ones(512, 2048)))")
    assert last.startswith("KeyboardInterrupt: Interrupted at ")
    little.run("import sys")
    assert little.value("type(sys.last_value).__name__") == "'KeyboardInterrupt'"
    assert little.value("hasattr(sys.last_value, '_render_traceback_')") == "False"


def test_of_any_other_interrupt_the_whole_traceback_is_folded(kernel: Kernel) -> None:
    ran = kernel.run("%%memgauge\nraise KeyboardInterrupt")
    assert ran.traceback.splitlines()[0] == "Traceback of your own code (most recent call last):"
    assert "everything is as your code left it" in ran.traceback
    assert "The full traceback" in ran.displays[-1]["text/html"]


@on_both_stacks
def test_the_guard_ends_an_awaiting_cell(little: Kernel) -> None:
    body = ALLOCATE.replace("time.sleep", "await asyncio.sleep")  # at each of them the kernel can end the cell, as with the Stop button
    ran = little.run(f"%%memgauge --guard {share(little)}\nimport asyncio\n{body}")
    assert (ran.status, ran.ename) == ("error", "CancelledError")  # so ipykernel ends a cell that awaits
    assert little.value("0 < len(kept) < 90") == "True"
    assert any("Stopped by guard at" in page for page in pages(ran))


def test_a_guard_that_is_passed_already_is_said_before_anything_runs(little: Kernel) -> None:
    ran = little.run("%%memgauge --guard 1%\nnever = 1")
    assert ran.ename == "UsageError"
    assert "are used already" in ran.stderr + ran.traceback + ran.evalue
    assert little.value("'never' in dir()") == "False"


@on_both_stacks
def test_one_gauge_over_all_cells(kernel: Kernel) -> None:
    begun = kernel.run("%memgauge on -o whole")
    assert begun.status == "ok"
    assert "Peak so far" in begun.text
    seen = kernel.folder / "seen"
    sent, messages = everything_during(kernel, GROW, seen)
    assert seen.exists()
    seen.unlink()
    own = {message["msg_type"] for message in messages if message["parent_header"]["msg_id"] == sent}
    assert own <= {"status", "execute_input", "update_display_data"}  # an update adds no output, whichever cell it names
    assert kernel.run("%memgauge on").ename == "UsageError"
    ended = kernel.run("%memgauge off")
    assert any(re.match(r"\[. (fine|caution|note)\] Process ", page) for page in pages(ended))
    assert kernel.value("whole.rss_peak_bytes > 0") == "True"
    assert kernel.run("%memgauge off").ename == "UsageError"
    assert kernel.run("%%memgauge on\n1").ename == "UsageError"
    assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'torchdebug' in t.name]") == "[]"


def test_a_lasting_guard_says_in_the_cell_that_it_interrupted(little: Kernel) -> None:
    little.run(f"%memgauge on --guard {share(little)}")
    ran = little.run(ALLOCATE)
    assert ran.ename == "KeyboardInterrupt"
    assert any("Interrupted at" in page for page in pages(ran))
    after = little.run("kept.clear()\ntime.sleep(0.2)")
    assert (after.status, after.outputs) == ("ok", [])
    again = little.run(ALLOCATE)
    assert any("Interrupted at" in page for page in pages(again))
    assert little.run("%memgauge off").status == "ok"


def test_unloading_ends_a_lasting_gauge(kernel: Kernel) -> None:
    kernel.run("%memgauge on")
    ran = kernel.run("%unload_ext torchdebug_magics")
    try:
        assert ran.status == "ok"
        assert any(", peak " in page for page in pages(ran))
        assert kernel.value("[t.name for t in __import__('threading').enumerate() if 'torchdebug' in t.name]") == "[]"
    finally:
        kernel.run("%load_ext torchdebug_magics")
