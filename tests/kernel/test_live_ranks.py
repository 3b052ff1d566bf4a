"""The live report of a cell that launches processes, read while it hangs: what is true of all of them, as their launcher sees it."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kernel.kernels import Kernel, Message, Ran

pytestmark = pytest.mark.waits

SETUP = """
import os, multiprocessing, sys
import torch.multiprocessing as mp
sys.path.insert(0, FOLDER)
from uneven import train
store = FOLDER + "/store"
"""
UNEVEN = """\
import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank=None, store=None):
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model = DDP(torch.nn.Linear(4, 1))
    for batch in torch.randn(11, 2, 4)[dist.get_rank()::2]:
        model(batch).mean().backward()
    dist.barrier()
"""
# One that was killed may still be leaving.
LEFT = "[child.name for child in multiprocessing.active_children() if child.join(2) or child.exitcode is None]"
STARTED = """
ranks = [multiprocessing.get_context("METHOD").Process(target=train, args=(rank, store), name=f"rank-{rank}") for rank in range(2)]
for process in ranks: process.start()
for process in ranks: process.join()
"""
LAUNCHES = {
    "Process, fork": STARTED.replace("METHOD", "fork"),
    "Process, spawn": STARTED.replace("METHOD", "spawn"),
    "mp.start_processes, fork": "mp.start_processes(train, (store,), nprocs=2, start_method='fork')",
    "mp.spawn": "mp.spawn(train, (store,), nprocs=2)",
}
QUICKEST = "Process, fork"
ACCELERATE = """
import socket
from accelerate import notebook_launcher
with socket.socket() as free:
    free.bind(("127.0.0.1", 0)); port = str(free.getsockname()[1])
notebook_launcher(train, num_processes=2, use_port=port)
"""
CHILD = """
def program():
    PROGRAM

child = multiprocessing.get_context("fork").Process(target=program, name="asker")
child.start()
child.join()
"""
# An import is as slow as that of a module on a cold disk; the frames of a finder are the interpreter's.
SLOW_IMPORT = '''
FINDER = """
import sys, time
class Slow:
    def find_spec(name, path=None, target=None):
        if name == "torchdebug_magics.ranks.rank_session":
            time.sleep(60)
sys.meta_path.insert(0, Slow)
"""
exec(compile(FINDER, "<frozen slow>", "exec"))
'''


@pytest.fixture
def launching(start_kernel: Callable[[str], Kernel], tmp_path: Path) -> Iterator[Kernel]:
    """A fresh kernel, as what is forked has all that ran before, in which `train` is importable; no process of it is left."""
    kernel = start_kernel("modern")
    assert kernel.run("%load_ext torchdebug_magics").status == "ok"
    set_up(kernel, tmp_path)
    yield kernel
    assert kernel.value(LEFT) == "[]"
    assert kernel.run("sys.path.pop(0); del sys.modules['uneven'], train").status == "ok"


def set_up(kernel: Kernel, folder: Path) -> None:
    (folder / "uneven.py").write_text(UNEVEN)
    assert kernel.run(SETUP.replace("FOLDER", repr(str(folder)))).status == "ok"


def live(message: Message) -> str:
    """The words that a message puts into the live view; empty for any other message."""
    is_live = message["msg_type"] == "comm_msg"
    page = message["content"]["data"].get("state", {}).get("value", "") if is_live else ""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def says(words: str) -> Callable[[Message], bool]:
    return lambda message: words in live(message)


def live_texts(ran: Ran) -> list[str]:
    return [text for message in ran.messages if (text := live(message))]


@pytest.mark.parametrize(
    "launch", [QUICKEST, *(pytest.param(launch, marks=pytest.mark.thorough) for launch in LAUNCHES if launch != QUICKEST)]
)
def test_the_live_report_of_ranks_is_their_launchers_verdict(launch: str, launching: Kernel) -> None:
    is_the_launchers_verdict(launching, LAUNCHES[launch])


@pytest.mark.thorough
def test_the_live_report_of_ranks_under_the_launcher_of_accelerate(start_kernel: Callable[[str], Kernel], tmp_path: Path) -> None:
    """In a kernel of its own, as the launcher puts its handlers of signals in place for good."""
    kernel = start_kernel("modern")
    assert kernel.run("%load_ext torchdebug_magics").status == "ok"
    set_up(kernel, tmp_path)
    is_the_launchers_verdict(kernel, ACCELERATE)
    assert kernel.value(LEFT) == "[]"


def is_the_launchers_verdict(kernel: Kernel, cell: str) -> None:
    ran = kernel.run(f"%%hangwatch --after 2 -o h\n{cell}", interrupt_at=says("Stuck: rank 1 has run out of batches"))
    verdict = next(text for text in live_texts(ran) if "Stuck" in text)
    assert "dist.barrier()" in verdict
    assert "wrap the loop in with model.join():" in verdict
    assert "rank 0 waits for it in backward" in verdict
    assert "all_reduce #11 [5]" in verdict
    assert not any("the main thread has been in" in text for text in live_texts(ran)), "a rank's own report"
    assert ran.status == "error"
    assert kernel.value("(h.state, h.cause, h.root.who)") == "('stuck', 'uneven_batches', 'rank 1')"


@pytest.mark.parametrize(
    ("prompt", "verdict"),
    [
        ("input('name? ')", "process asker waits for input"),
        pytest.param("import pdb; pdb.set_trace()", "process asker has stopped in a debugger", marks=pytest.mark.thorough),
    ],
)
def test_a_prompt_in_a_child_is_not_answered_under_the_cell(
    prompt: str, verdict: str, launching: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = launching.client.execute
    monkeypatch.setattr(launching.client, "execute", lambda code, **options: execute(code, **{**options, "allow_stdin": True}))
    ran = launching.run(f"%%hangwatch --after 2\n{CHILD.replace('PROGRAM', prompt)}", interrupt_at=says(f"Stuck: {verdict}"))
    assert not any("under the cell" in text for text in [*live_texts(ran), ran.text])
    assert "a child process cannot read the keyboard" in ran.text


def test_the_start_of_a_child_is_not_called_an_import_of_this_package(launching: Kernel, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    launching.run(f"path = os.environ.get('PYTHONPATH', ''); os.environ['PYTHONPATH'] = {str(tmp_path)!r} + os.pathsep + path")
    cell = "child = multiprocessing.get_context('spawn').Process(target=train, name='late')\nchild.start()\nchild.join()"
    ran = launching.run(f"%%hangwatch --after 2\n{cell}", interrupt_at=says("Slow: process late is starting"))
    launching.run("os.environ['PYTHONPATH'] = path")
    assert not any("torchdebug" in text for text in live_texts(ran))
