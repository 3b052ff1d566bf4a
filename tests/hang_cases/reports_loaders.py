"""Cells of people who asked why their DataLoader hangs, is stuck, or only looks it; the truth is what the thread settled on."""

from __future__ import annotations

from tests.hang_cases.case import HangCase

__all__ = ["CASES"]

CASES = (
    HangCase(
        name="report_loader_executor_older_than_the_worker",
        cell="""\
import torch
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, Dataset

class OceanDataset(Dataset):
    def __init__(self):
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.mean = self.pool.submit(lambda: torch.zeros(3)).result()
    def load(self, name):
        return torch.full((3,), float(name))
    def __len__(self):
        return 8
    def __getitem__(self, i):
        field = self.pool.submit(self.load, i)
        return field.result() - self.mean

for step, batch in enumerate(DataLoader(OceanDataset(), batch_size=2, num_workers=1)):
    print(step, batch.shape)
""",
        state=("stuck",),
        cause=("worker_blocked",),
        line=(16,),
        root="worker 0",
        kind=("event", "lock", "queue"),
        edges=(("main", "worker 0"),),
        says=("fork|worker_init_fn|in the worker|inside the worker|__getitem__|num_workers=0",),
        raises="KeyboardInterrupt",
        source="https://github.com/m2lines/Samudra/pull/660",
    ),
    HangCase(
        name="report_loader_lock_held_by_a_thread_at_the_fork",
        cell="""\
import threading, time
import torch
from torch.utils.data import DataLoader, Dataset

decoder_lock = threading.Lock()

class Images(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        with decoder_lock:
            return torch.zeros(3, 8, 8)

def warm_up():
    with decoder_lock:
        time.sleep(1.0)

threading.Thread(target=warm_up, daemon=True).start()
time.sleep(0.2)
val_loader = DataLoader(Images(), batch_size=2, num_workers=2)
for images in val_loader:
    print(images.shape)
""",
        state=("stuck",),
        cause=("worker_blocked", "lock_never_released"),
        line=(12,),
        kind=("lock",),
        edges=(("main", "worker 0"),),
        says=("fork|spawn", "lock"),
        raises="KeyboardInterrupt",
        source="https://github.com/ultralytics/ultralytics/pull/26085",
    ),
    HangCase(
        name="report_loader_sleeping_dataset_is_healthy",
        cell="""\
from torch.utils.data import DataLoader, Dataset
import time

class MyDataset(Dataset):
    def __getitem__(self, i):
        time.sleep(0.1)
        return i
    def __len__(self):
        return 50

loader = DataLoader(MyDataset(), batch_size=8, num_workers=4)
for batch in loader:
    print(batch)
""",
        ends="itself",
        state=("finished",),
        source="https://github.com/pytorch/pytorch/issues/167909",
    ),
    HangCase(
        name="report_loader_every_nth_batch_waits",
        cell="""\
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Clips(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        raw = bytearray()
        end = time.perf_counter() + 1.5
        while time.perf_counter() < end:
            raw = bytes(raw[:1000]) + bytes(1000)
        return torch.zeros(4)

model = torch.nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, x in enumerate(DataLoader(Clips(), batch_size=2, num_workers=2)):
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        ends="itself",
        state=("slow",),
        cause=("data_loading",),
        line=(10, 11, 12, 13, 18),
        says=("num_workers|__getitem__|Dataset",),
        source="https://github.com/pytorch/pytorch/issues/19836",
    ),
    HangCase(
        name="report_loader_workers_made_again_each_epoch",
        cell="""\
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

def open_archive(worker_id):
    index = {}
    end = time.perf_counter() + 3.0
    while time.perf_counter() < end:
        index[len(index) % 1000] = worker_id

train = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
loader = DataLoader(train, batch_size=2, num_workers=2, worker_init_fn=open_archive)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in loader:
        loss = (model(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch)
""",
        ends="itself",
        state=("slow",),
        cause=("data_loading",),
        line=(8, 9, 10, 17),
        says=("persistent_workers|worker_init_fn",),
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/4450",
    ),
    HangCase(
        name="report_loader_debugger_in_getitem",
        cell="""\
import pdb
import torch
from torch.utils.data import DataLoader, Dataset

class Mosaic(Dataset):
    def __len__(self):
        return 8
    def pull_item(self, i):
        img = torch.zeros(3, 4, 4)
        pdb.Pdb().set_trace()
        return img
    def __getitem__(self, i):
        return self.pull_item(i)

for images in DataLoader(Mosaic(), batch_size=2, num_workers=1):
    print(images.shape)
""",
        state=("stuck",),
        cause=("debugger_in_worker",),
        line=(11, 12),
        root="worker 0",
        edges=(("main", "worker 0"),),
        says=("num_workers=0",),
        raises="KeyboardInterrupt",
        source="https://github.com/Megvii-BaseDetection/YOLOX/issues/843",
    ),
    HangCase(
        name="report_loader_generator_that_runs_dry",
        cell="""\
import torch

shards = [[torch.ones(4) for _ in range(6)] for _ in range(2)]

def tokenizing_loader(batch, resume_from=0):
    at = resume_from
    while True:
        while at < len(shards):
            documents = shards[at]
            for k in range(0, len(documents), batch):
                yield torch.stack(documents[k : k + batch])
            at += 1

train_loader = tokenizing_loader(3)
model = torch.nn.Linear(4, 1)
for step in range(100):
    x = next(train_loader)
    model(x).sum().backward()
""",
        state=("stuck", "slow"),
        cause=("infinite_loop",),
        line=(8, 9),
        root="main",
        kind=("python",),
        says=("loop|never end",),
        raises="KeyboardInterrupt",
        source="https://github.com/karpathy/nanochat/issues/371",
    ),
    HangCase(
        name="report_loader_tokenizer_used_before_the_fork",
        cell="""\
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset

tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

class PrefetchDataset(Dataset):
    def __init__(self, texts):
        self.ids = [e.ids for e in tokenizer.encode_batch(texts)]
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, i):
        again = tokenizer.encode_batch(["the cat sat", "the cat"])
        return torch.tensor(self.ids[i] + again[0].ids)

for batch in DataLoader(PrefetchDataset(["the cat sat"] * 32), batch_size=8, num_workers=2):
    print(batch.shape)
""",
        ends="itself",
        state=("finished",),
        needs="tokenizers",
        source="https://github.com/huggingface/tokenizers/issues/646",
    ),
    HangCase(
        name="report_loader_pool_of_a_function_from_the_cell_under_spawn",
        cell="""\
import multiprocessing

def f(x):
    return x * x

context = multiprocessing.get_context("spawn")
with context.Pool(2) as p:
    print(p.map(f, [1, 2, 3]))
""",
        state=("stuck", "slow"),
        cause=("worker_died",),
        line=(9,),
        says=("__main__|cell|module|.py", "fork|file|import"),
        raises="KeyboardInterrupt",
        source="https://github.com/jupyter/notebook/issues/5261",
    ),
    HangCase(
        name="report_loader_dataset_of_the_cell_under_spawn",
        cell="""\
import torch
from torch.utils.data import DataLoader, Dataset

class Faces(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.zeros(3)

for batch in DataLoader(Faces(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
    print(batch.shape)
""",
        ends="itself",
        state=("finished", "slow", "stuck"),
        cause=("worker_died", None),
        raises="RuntimeError",
        source="https://github.com/pytorch/pytorch/issues/51344",
    ),
    HangCase(
        name="report_loader_large_tensors_are_healthy",
        cell="""\
import torch
from torch.utils.data import Dataset

class dts(Dataset):
    def __init__(self, dataset_size=10):
        super().__init__()
        self.dataset_size = dataset_size
        self.data = torch.rand(dataset_size, 3, 100, 100)
    def __len__(self):
        return self.dataset_size
    def __getitem__(self, idx):
        return self.data[idx]

dl = torch.utils.data.DataLoader(dataset=dts(), num_workers=2, batch_size=8)
for data in dl:
    debug = "debug"
""",
        ends="itself",
        state=("finished",),
        source="https://github.com/pytorch/pytorch/issues/89352",
    ),
)
