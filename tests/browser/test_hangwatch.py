"""The verdict of a cell that hangs is in JupyterLab while it still hangs; Stop then ends the cell, and the report stays."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import EACH_RAN
from tests.browser.reading import complaints, resize, stand_still

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = """
import threading
import time
import torch
from torch.utils.data import DataLoader, Dataset
%load_ext torchdebug_magics
"""

STUCK = """
%%hangwatch --after 2
class Shards(Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 16

    def shard(self, number):
        with self.lock:
            return torch.full((4,), number)

    def __getitem__(self, index):
        with self.lock:
            return self.shard(index // 4)[index % 4]


for batch in DataLoader(Shards(), batch_size=4, num_workers=2):
    print(batch)
"""

SLOW = """
%%hangwatch --after 1
time.sleep(6)
"""

HANGS = """
forever = threading.Lock()
forever.acquire()
forever.acquire()
"""

IMPORTS = """
import os
import socket
import torch
import torch._dynamo  # which DDP imports: once here, not in each rank
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""
PORT = """
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
"""
RANKS = """
%%hangwatch
def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in torch.randn(11, 2, 4)[rank::2]:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    dist.barrier()

ranks = [mp.get_context("fork").Process(target=train, args=(rank,), name=f"rank-{rank}") for rank in range(2)]
for process in ranks:
    process.start()
for process in ranks:
    process.join()
"""
LEFT = "[child.join(5) for child in mp.active_children()]; len(mp.active_children())"

HAS_SEEN = "word => window.seenTexts.some(text => text.includes(word))"
VERDICT = "Stuck: DataLoader worker 0 waits for a lock that it holds itself"


def wait_for(lab: Lab, words: str) -> None:
    lab.page.wait_for_function(HAS_SEEN, arg=words, timeout=60_000)
    assert not lab.page.evaluate(EACH_RAN), f"{words!r} appeared only when the cell had ended"


def test_the_verdict_appears_while_the_cell_hangs_and_stop_ends_it(lab: Lab) -> None:
    lab.open("stuck.ipynb", [SETUP, STUCK, "len(torch.multiprocessing.active_children())"], may_stop=True)
    lab.start_all()
    wait_for(lab, VERDICT)
    assert "In[2] line 10" in lab.text(1)
    assert "In[2] line 14" in lab.text(1), "where the lock was acquired"
    assert not lab.page.evaluate(EACH_RAN)
    lab.command("notebook:interrupt-kernel")
    lab.wait_for_each_cell()
    text = lab.text(1)
    assert VERDICT in text
    assert "KeyboardInterrupt" in text
    assert lab.text(2) == "0"
    stand_still(lab.page)
    resize(lab.page, 1200)
    assert complaints(lab.page, all_in_sight=True) == []
    assert not lab.console_errors, lab.console_errors


def test_the_example_of_the_guide_is_what_a_user_reads_while_ranks_hang(lab: Lab, root: Path) -> None:
    example = (root / "docs/guide.md").read_text(encoding="utf-8").partition("Of launched ranks it names")[2].split("```")[1]
    title, *rows = (" ".join(line.split()) for line in example.replace("`", "").strip().splitlines())
    lab.open("ranks.ipynb", ["%load_ext torchdebug_magics", IMPORTS, PORT, RANKS, LEFT], may_stop=True)
    lab.start_all()
    wait_for(lab, title)
    shown = " ".join(re.sub(r", pid \d+", "", lab.text(3)).split())
    for row in rows:
        assert row.partition(" · for ")[0] in shown, shown
    assert not lab.page.evaluate(EACH_RAN)
    lab.command("notebook:interrupt-kernel")
    lab.wait_for_each_cell()
    assert not any("Slow" in text for text in lab.seen_texts()), "the report of one rank, which does not see the others"
    assert title in lab.text(3)
    assert lab.text(4) == "0"
    assert not lab.console_errors, lab.console_errors


@pytest.mark.thorough
def test_a_stuck_cell_ends_by_itself_and_the_saved_report_is_whole(lab: Lab) -> None:
    lab.open("ends.ipynb", [SETUP, STUCK.replace("--after 2", "--after 2 --stop"), SLOW], may_stop=True)
    lab.start_all()
    wait_for(lab, "Slow: the main thread sleeps in time.sleep(6)")
    lab.wait_for_each_cell()
    assert VERDICT in lab.text(1)
    assert "sleeps" in lab.text(2)
    assert "widget-view" not in json.dumps(lab.save()["cells"])
    lab.reopen_with_a_new_kernel()
    assert VERDICT in lab.text(1)
    assert lab.tables(1).count() >= 1


@pytest.mark.thorough
def test_a_watch_over_all_cells_speaks_in_its_own_place(lab: Lab) -> None:
    lab.open("lasting.ipynb", [SETUP, "%hangwatch on --after 2", HANGS, "%hangwatch off"], may_stop=True)
    lab.start_all()
    wait_for(lab, "Stuck: the main thread waits for a lock that it holds itself")
    assert "Stuck" in lab.text(1)
    assert lab.text(2) == ""
    lab.command("notebook:interrupt-kernel")
    lab.wait_for_each_cell()
    assert "Stuck" not in lab.text(1)
    assert "KeyboardInterrupt" in lab.text(2)
    assert "Stuck: the main thread waits for a lock that it holds itself · In[3] line 3" in lab.text(3)
