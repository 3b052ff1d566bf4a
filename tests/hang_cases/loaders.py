"""DataLoader: its workers, its debugger, its deaths."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
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
        name="forked_while_a_thread_held_the_lock",
        setup=WARM,
        cell="""
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

log_lock = threading.Lock()


def flush_log():
    with log_lock:
        time.sleep(1.5)


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with log_lock: #!
            return torch.tensor(float(index))


threading.Thread(target=flush_log, name="flusher", daemon=True).start()
time.sleep(0.2)
total = sum(batch.sum() for batch in DataLoader(Numbers(), batch_size=2, num_workers=1))
""",
        cause=("lock_never_released", "worker_blocked"),
        root="worker 0",
        kind=("lock",),
        edges=(("main", "worker 0"),),
        where="with log_lock",
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
        name="input_in_a_collate_function",
        setup="import torch\nfrom torch.utils.data import DataLoader",
        cell="""
def collate(rows):
    batch = torch.stack(rows)
    if batch.max() > 5:
        input("go on? ") #!
    return batch


loader = DataLoader([torch.tensor([float(n)]) for n in range(12)], batch_size=3, num_workers=2, collate_fn=collate)
seen = [batch.mean().item() for batch in loader]
""",
        cause=("debugger_in_worker", "input_waiting", "worker_blocked"),
        root="worker 0",
        kind=("input",),
        edges=(("main", "worker 0"),),
        raises=STOPPED,
    ),
    planted(
        name="worker_waits_for_a_permit",
        setup=WARM,
        cell="""
import multiprocessing as mp

import torch
from torch.utils.data import DataLoader, Dataset

permits = mp.get_context("fork").Queue()
for _ in range(3):
    permits.put(1)


class Limited(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        permits.get() #!
        return torch.zeros(2)


print(len(list(DataLoader(Limited(), batch_size=1, num_workers=1))))
""",
        cause=("queue_never_fed", "worker_blocked"),
        root="worker 0",
        kind=("queue",),
        edges=(("main", "worker 0"),),
        says=("batch 3",),
        raises=STOPPED,
    ),
    planted(
        name="collate_waits_for_an_event",
        setup=WARM,
        cell="""
import multiprocessing as mp

import torch
from torch.utils.data import DataLoader, TensorDataset

tokenizer_ready = mp.get_context("fork").Event()


def pad(rows):
    tokenizer_ready.wait() #!
    return torch.stack([row[0] for row in rows])


data = TensorDataset(torch.randn(12, 5))
model = torch.nn.Linear(5, 1)
for epoch in range(2):
    for batch in DataLoader(data, batch_size=4, num_workers=2, collate_fn=pad, persistent_workers=True):
        model(batch).sum().backward()
""",
        cause=("event_never_set", "worker_blocked"),
        root="worker 0",
        kind=("event", "lock"),
        edges=(("main", "worker 0"),),
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
        name="blocked_worker_and_a_timeout_of_the_loader",
        setup=WARM,
        cell="""
import threading

import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(3):
            yield torch.tensor(index)
        threading.Event().wait() #!


for value in DataLoader(Stream(), batch_size=None, num_workers=1, timeout=7):
    print(value)
""",
        ends="itself",
        cause=("event_never_set", "worker_blocked"),
        root="worker 0",
        kind=("event", "lock"),
        edges=(("main", "worker 0"),),
        raises="RuntimeError",
    ),
    planted(
        name="sampler_in_main_waits_not_the_worker",
        setup=WARM,
        cell="""
import queue

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

requested = queue.Queue()
for index in (3, 1, 2, 0, 5, 4):
    requested.put(index)


class OnDemand(Sampler):
    def __iter__(self):
        while True:
            yield requested.get() #!


data = TensorDataset(torch.arange(6.0))
for (x,) in DataLoader(data, batch_size=2, sampler=OnDemand(), num_workers=1):
    print(x)
""",
        cause=("queue_never_fed",),
        root="main",
        kind=("queue",),
        where="requested.get()",
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
        name="exception_in_a_worker",
        setup=WARM,
        cell="""
import torch
from torch.utils.data import DataLoader


class Parser(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(float("1,5" if index == 4 else "1.5"))


for batch in DataLoader(Parser(), batch_size=2, num_workers=2):
    pass
""",
        ends="itself",
        state=("finished",),
        cause=(None, "worker_died"),
        raises="ValueError",
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
        name="slow_decoding_in_the_main_process",
        setup=WARM,
        cell="""
import torch
from torch.utils.data import DataLoader, Dataset


class Encoded(Dataset):
    def __len__(self):
        return 2

    def decode(self, index):
        value = index
        for _ in range(20_000_000): #!
            value = (value * 1103515245 + 12345) % 2147483648 #!
        return value

    def __getitem__(self, index):
        return torch.tensor(self.decode(index) / 2147483648)


for batch in DataLoader(Encoded(), batch_size=2):
    print(batch)
""",
        ends="itself",
        state=("slow", "finished"),
        cause=("data_loading", None),
    ),
    planted(
        name="persistent_workers_over_epochs",
        setup=WARM,
        cell="""
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8, num_workers=2, persistent_workers=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    time.sleep(0.4)
del loader
""",
        ends="itself",
        state=("finished",),
    ),
    planted(
        name="workers_of_an_earlier_cell_idle_on",
        setup="""
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8, num_workers=2, persistent_workers=True)
for (x,) in loader:
    pass
""",
        cell="""
total = sum(x.sum() for (x,) in loader)
summary = threading.Lock()
summary.acquire() #!
with summary: #!
    print(total)
""",
        cause=("self_deadlock", "lock_never_released"),
        root="main",
        kind=("lock",),
        raises=STOPPED,
    ),
    planted(
        name="steady_loader_with_half_a_second_a_batch",
        setup=WARM,
        cell="""
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        time.sleep(0.5)
        return torch.randn(3, 8, 8)


means = [batch.mean() for batch in DataLoader(Pictures(), batch_size=1, num_workers=1)]
""",
        ends="itself",
        state=("finished",),
    ),
)
