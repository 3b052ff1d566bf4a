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
        name="both_ends_of_a_pipe_receive",
        cell="""
import multiprocessing as mp

here, there = mp.Pipe()


def serve():
    while True:
        question = there.recv() #!
        there.send(question * 2)


peer = mp.get_context("fork").Process(target=serve, name="server", daemon=True)
peer.start()
here.send(1)
here.send(2)
answers = [here.recv() for _ in range(3)] #!
""",
        cause=("deadlock", "queue_never_fed", "native_wait"),
        kind=("queue", "io"),
        raises=STOPPED,
    ),
    planted(
        name="pool_task_that_kills_its_worker",
        cell="""
import multiprocessing as mp
import os


def decode(index):
    if index == 3:
        os._exit(7)
    return index


with mp.get_context("fork").Pool(2) as pool:
    print(pool.map(decode, range(6), chunksize=1)) #!
""",
        cause=("worker_died",),
        says=("7",),
        raises=STOPPED,
    ),
    planted(
        name="lock_of_a_child_that_was_killed",
        cell="""
import multiprocessing as mp
import os
import signal
import time

context = mp.get_context("fork")
checkpoint = context.Lock()
held = context.Event()


def write():
    with checkpoint: #!
        held.set()
        time.sleep(600)


writer = context.Process(target=write, name="writer")
writer.start()
held.wait()
os.kill(writer.pid, signal.SIGKILL)
writer.join()
checkpoint.acquire() #!
""",
        cause=("lock_never_released", "worker_died"),
        kind=("lock", "dead"),
        raises=STOPPED,
    ),
    planted(
        name="grandchild_waits",
        cell="""
import multiprocessing as mp

context = mp.get_context("fork")
released = context.Event()


def inner():
    released.wait() #!


def outer():
    process = context.Process(target=inner, name="inner")
    process.start()
    process.join()


process = context.Process(target=outer, name="outer")
process.start()
process.join()
""",
        cause=("event_never_set",),
        root="process inner",
        kind=("event", "lock"),
        edges=(("main", "process outer"), ("process outer", "process inner")),
        raises=STOPPED,
    ),
    planted(
        name="child_whose_thread_waits",
        cell="""
import multiprocessing as mp
import queue
import threading


def serve():
    inbox = queue.Queue()
    listener = threading.Thread(target=lambda: inbox.get(), name="listener") #!
    listener.start()
    listener.join() #!


server = mp.get_context("fork").Process(target=serve, name="server")
server.start()
server.join()
""",
        cause=("queue_never_fed",),
        kind=("queue", "join"),
        edges=(("main", "process server"),),
        raises=STOPPED,
    ),
    planted(
        name="starmap_with_a_lock_of_the_parent",
        cell="""
import multiprocessing as mp
import threading

cache_lock = threading.Lock()


def lookup(key, offset):
    with cache_lock: #!
        return key + offset


context = mp.get_context("fork")
with cache_lock:
    with context.Pool(2) as pool:
        print(pool.starmap(lookup, [(1, 2), (3, 4)]))
""",
        cause=("lock_never_released", "deadlock"),
        kind=("lock",),
        where="with cache_lock",
        raises=STOPPED,
    ),
    planted(
        name="subprocess_that_sleeps",
        cell="""
import subprocess

subprocess.run(["sleep", "6"], check=True) #!
""",
        ends="itself",
        state=("slow",),
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
        name="init_function_reads_a_silent_socket",
        setup=WARM,
        cell="""
import socket

import torch
from torch.utils.data import DataLoader, TensorDataset

server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]


def connect(worker_id):
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"hello")
    client.recv(16) #!


try:
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 2)), num_workers=1, worker_init_fn=connect):
        print(x)
finally:
    server.close()
""",
        state=("stuck", "slow"),
        ends="interrupt",
        interrupt_s=7.0,
        cause=("worker_blocked", "network"),
        root="worker 0",
        kind=("io",),
        edges=(("main", "worker 0"),),
        raises=STOPPED,
    ),
    planted(
        name="worker_leaves_by_os_exit",
        setup=WARM,
        cell="""
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Decoder(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            time.sleep(0.5)
            os._exit(3)
        return torch.zeros(2)


for batch in DataLoader(Decoder(), batch_size=2, num_workers=1):
    pass
""",
        ends="itself",
        state=("finished",),
        cause=("worker_died",),
        says=("exit code 3|exited with 3|exited with code 3|exitcode 3|code 3|status 3",),
        raises="RuntimeError",
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
    planted(
        name="openmp_after_fork",
        setup="""
import torch

torch.set_num_threads(2)
warm = torch.randn(600, 600) @ torch.randn(600, 600)
""",
        cell="""
import multiprocessing as mp


def evaluate(size):
    x = torch.randn(size, size)
    y = x @ x #!
    print(y.mean())


child = mp.get_context("fork").Process(target=evaluate, args=(600,), name="evaluator")
child.start()
child.join()
""",
        cause=("openmp_after_fork",),
        root="process evaluator",
        kind=("native",),
        where="x @ x",
        edges=(("main", "process evaluator"),),
        says=("set_num_threads(1)|spawn",),
        raises=STOPPED,
    ),
)
