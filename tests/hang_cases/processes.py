"""Processes, pools, and workers of a DataLoader."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="openmp_after_fork_in_a_pool",
        setup="""
import torch

torch.set_num_threads(2)
weights = torch.randn(2000, 2000)
norm = weights.sum()
""",
        cell="""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def row_means(scale):
    return (weights * scale).exp().mean(dim=1).sum().item() #!


with ProcessPoolExecutor(max_workers=2, mp_context=get_context("fork")) as pool:
    print(list(pool.map(row_means, [0.1, 0.2])))
""",
        cause=("openmp_after_fork",),
        kind=("native",),
        where="weights * scale",
        raises=STOPPED,
    ),
    planted(
        name="debugger_in_a_worker",
        source="https://discuss.pytorch.org/t/using-pdb-in-dataset-with-num-workers/",
        setup=WARM,
        cell="""
import pdb

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        row = torch.arange(3.0) + index
        if index == 2:
            pdb.Pdb().set_trace() #!
        return row / row.sum() #!


for batch in DataLoader(Rows(), batch_size=2, num_workers=1):
    print(batch.mean())
""",
        cause=("debugger_in_worker",),
        root="worker 0",
        kind=("input",),
        edges=(("main", "worker 0"),),
        says=("debugger|pdb", "num_workers"),
        raises=STOPPED,
    ),
    planted(
        name="worker_killed",
        setup=WARM,
        cell="""
import os
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Hungry(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2)


for batch in DataLoader(Hungry(), batch_size=2, num_workers=1):
    pass
""",
        ends="itself",
        state=("finished",),
        cause=("worker_died",),
        says=("kill|-9",),
        raises="RuntimeError",
    ),
    planted(
        name="dataset_of_the_cell_under_spawn",
        setup=WARM,
        cell="""
import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index**2)


for batch in DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn"): #!
    print(batch)
""",
        ends="itself",
        state=("finished", "slow"),
        cause=("worker_died",),
        says=("spawn|__main__", "module|file|import|fork"),
        raises="RuntimeError",
    ),
    planted(
        name="slow_dataset_with_workers",
        setup=WARM,
        cell="""
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(3.0) #!
        return torch.randn(8)


model = torch.nn.Linear(8, 1)
for batch in DataLoader(Volumes(), batch_size=2, num_workers=2): #!
    model(batch).mean().backward()
""",
        ends="itself",
        state=("slow",),
        cause=("data_loading",),
        kind=("sleep", "batch"),
        says=("num_workers|worker",),
    ),
    planted(
        name="worker_locks_itself_out",
        setup="import threading\n\nimport torch\nfrom torch.utils.data import DataLoader, Dataset",
        cell="""
class Shards(Dataset):
    def __init__(self):
        self.lock = threading.Lock()
        self.opened = {}

    def __len__(self):
        return 16

    def shard(self, number):
        with self.lock: #!
            return self.opened.setdefault(number, torch.randn(4, 3))

    def __getitem__(self, index):
        if index < 5:
            return self.shard(index // 4)[index % 4]
        with self.lock:
            return self.shard(index // 4)[index % 4]


for batch in DataLoader(Shards(), batch_size=4, num_workers=2):
    print(batch.shape)
""",
        cause=("self_deadlock", "worker_blocked"),
        root="worker 1",
        kind=("lock",),
        edges=(("main", "worker 1"),),
        says=("batch 1",),
        raises=STOPPED,
    ),
)
