"""Cells of people who asked why their script or notebook hangs, away from loaders and ranks; the truth is what the thread settled on."""

from __future__ import annotations

from tests.hang_cases.case import HangCase

__all__ = ["CASES"]

CASES = (
    HangCase(
        name="report_other_einsum_after_fork",
        cell="""\
import torch
import torch.multiprocessing as mp

def foo():
    x = torch.ones((2, 120, 100))
    return torch.einsum("ijl,ikl->ijk", x, x)

torch.set_num_threads(2)
foo()
p = mp.get_context("fork").Process(target=foo, name="foo", daemon=True)
p.start()
p.join()
""",
        state=("stuck",),
        cause=("openmp_after_fork",),
        line=(7,),
        root="process foo",
        edges=(("main", "process foo"),),
        says=("set_num_threads|spawn",),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/17199",
    ),
    HangCase(
        name="report_other_float_after_fork",
        cell="""\
import numpy as np
from multiprocessing import get_context
import torch

torch.set_num_threads(2)

def do_task(N):
    mat = np.random.randn(N**3)
    a = torch.from_numpy(mat)
    print("a")
    a.float()
    print("b")

N = 60
do_task(N)
p = get_context("fork").Process(target=do_task, args=(N,), name="do_task", daemon=True)
p.start()
p.join()
""",
        state=("stuck",),
        cause=("openmp_after_fork",),
        line=(12,),
        root="process do_task",
        edges=(("main", "process do_task"),),
        says=("set_num_threads|spawn",),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/89693",
    ),
    HangCase(
        name="report_other_two_processes_build_a_network",
        cell="""\
import torch
from torch import multiprocessing as mp
from torch import nn

torch.set_num_threads(2)

def network():
    return nn.Sequential(nn.Conv2d(3, 64, 7), nn.Conv2d(64, 128, 3), nn.Linear(1024, 1000))

def run_worker(rank):
    print("Started Worker", rank)
    model = network()
    print("Does get here")
    copy = [p.clone() for p in model.parameters()]
    print("And should also get here", len(copy))

model = network()
copy1 = [p.clone() for p in model.parameters()]
context = mp.get_context("fork")
processes = [context.Process(target=run_worker, args=(rank,), daemon=True) for rank in range(2)]
for p in processes:
    p.start()
for p in processes:
    p.join()
""",
        state=("stuck",),
        cause=("openmp_after_fork",),
        line=(13, 15),
        kind=("native",),
        says=("set_num_threads|spawn",),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/50669",
    ),
    HangCase(
        name="report_other_queue_and_event_are_healthy",
        cell="""\
import torch.multiprocessing as mp

mp = mp.get_context("fork")

def main_worker(gpu, queue, event):
    queue.put({"gpu": gpu})
    event.wait()

queue, event, jobs = mp.Queue(), mp.Event(), []
for i in range(4):
    p = mp.Process(target=main_worker, args=(i, queue, event), daemon=True)
    p.start()
    jobs.append(p)
for i in range(4):
    print(queue.get())
event.set()
for p in jobs:
    p.join()
""",
        ends="itself",
        state=("finished",),
        source="https://github.com/pytorch/pytorch/issues/32299",
    ),
    HangCase(
        name="report_other_join_before_the_queue_is_empty",
        cell="""\
from multiprocessing import get_context

mp = get_context("fork")

def f(q):
    for i in range(10000):
        q.put([42, None, "hello"])

q = mp.Queue()
p = mp.Process(target=f, args=(q,), name="f", daemon=True)
p.start()
print(q.get())
p.join()
""",
        state=("stuck",),
        cause=("deadlock",),
        line=(14, 8),
        edges=(("main", "process f"),),
        says=("get|empty|drain|read", "join|queue"),
        raises="KeyboardInterrupt",
        source="https://github.com/python/cpython/issues/91594",
    ),
    HangCase(
        name="report_other_tensor_of_a_process_that_has_ended",
        cell="""\
import time
import torch
import torch.multiprocessing as mp

def func_with_bug(queue):
    queue.put(torch.zeros((2, 2)))

context = mp.get_context("fork")
queue = context.Queue()
p3 = context.Process(target=func_with_bug, args=(queue,), daemon=True)
p3.start()
time.sleep(1)
print(queue.get())
p3.join()
""",
        ends="itself",
        state=("finished",),
        raises="ConnectionRefusedError",
        source="https://github.com/pytorch/pytorch/issues/45831",
    ),
    HangCase(
        name="report_other_tqdm_lock_of_a_dead_process",
        cell="""\
import os, time
from multiprocessing import get_context
from tqdm import tqdm

lock = tqdm.get_lock()

def killed():
    lock.acquire()
    os._exit(1)

p = get_context("fork").Process(target=killed, daemon=True)
p.start()
p.join()
for step in tqdm(range(3), disable=True):
    time.sleep(0.1)
""",
        state=("stuck",),
        cause=("lock_never_released",),
        line=(15,),
        root="main",
        kind=("lock",),
        says=("lock",),
        raises="KeyboardInterrupt",
        source="https://github.com/tqdm/tqdm/issues/1500",
    ),
    HangCase(
        name="report_other_logging_after_fork_is_healthy",
        cell="""\
import logging, sys, threading, time
from multiprocessing import get_context

handler = logging.StreamHandler(sys.stderr)
log = logging.getLogger("rotating")
log.addHandler(handler)

def rotate():
    handler.acquire()
    time.sleep(1.5)
    handler.release()

def child():
    log.warning("from the child")

threading.Thread(target=rotate, daemon=True).start()
time.sleep(0.2)
p = get_context("fork").Process(target=child, daemon=True)
p.start()
p.join()
print(p.exitcode)
""",
        ends="itself",
        state=("finished",),
        source="https://github.com/python/cpython/pull/12704",
    ),
    HangCase(
        name="report_other_hidden_state_kept_between_batches",
        cell="""\
import torch
from torch import nn

class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.hidden2class = nn.Linear(16, 3)
        self.hidden = (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    def forward(self, x):
        lstm_out, self.hidden = self.lstm(x, self.hidden)
        return self.hidden2class(lstm_out[:, -1, :])

model = LSTM()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for i in range(400):
    loss = criterion(model(torch.randn(1, 12000, 8)), torch.tensor([i % 3]))
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
""",
        after_s=1.0,
        ends="interrupt",
        interrupt_s=30.0,
        state=("slow", "interrupted"),
        cause=("growing_graph",),
        line=(12, 21),
        root="main",
        says=("detach",),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/2769",
    ),
    HangCase(
        name="report_other_first_compiled_step",
        cell="""\
import random
import torch
from torch import nn

layers = [m for k in range(2) for m in (nn.Linear(16, 16), nn.LayerNorm(16, eps=random.random() * 1e-3), nn.GELU())]
model = torch.compile(nn.Sequential(*layers))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(torch.randn(4, 16)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step)
""",
        ends="itself",
        state=("slow",),
        cause=("compiling",),
        line=(10, 12),
        root="main",
        says=("compil",),
        source="https://github.com/pytorch/pytorch/issues/97783",
    ),
    HangCase(
        name="report_other_generate_to_the_maximum_length",
        cell="""\
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=64, n_positions=4096, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).eval()
output = model.generate(
    input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=1500, do_sample=False, suppress_tokens=[2], pad_token_id=0
)
print(output.shape)
""",
        ends="itself",
        state=("finished", "slow"),
        cause=(None,),
        needs="transformers",
        source="https://github.com/huggingface/transformers/issues/23175",
    ),
    HangCase(
        name="report_other_coroutine_of_the_loop_that_runs_the_cell",
        cell="""\
import asyncio

async def generate(prompt):
    await asyncio.sleep(0.01)
    return prompt.upper()

def ensure_exec_coro(coro):
    return asyncio.run_coroutine_threadsafe(coro, loop).result()

loop = asyncio.get_running_loop()
print(ensure_exec_coro(generate("hello")))
""",
        state=("stuck",),
        cause=("self_deadlock", "deadlock"),
        line=(9,),
        root="main",
        says=("await",),
        raises="KeyboardInterrupt",
        source="https://github.com/bentoml/OpenLLM/pull/478",
    ),
    HangCase(
        name="report_other_task_waits_for_a_task_of_its_own_pool",
        cell="""\
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huey")

def check_bean_count(n):
    return n * 2

def count_beans(n):
    return pool.submit(check_bean_count, n).result()

print(pool.submit(count_beans, 3).result())
""",
        state=("stuck",),
        cause=("deadlock", "self_deadlock"),
        line=(10,),
        root="thread huey_0",
        edges=(("main", "thread huey_0"),),
        says=("max_workers|pool|executor",),
        raises="KeyboardInterrupt",
        source="https://github.com/coleifer/huey/issues/618",
    ),
    HangCase(
        name="report_other_popen_wait_with_a_full_pipe",
        cell="""\
import subprocess, sys

program = "print('step ' * 40000)"
proc = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
code = proc.wait()
out = proc.stdout.read()
""",
        state=("stuck",),
        cause=("deadlock",),
        line=(6,),
        says=("communicate",),
        raises="KeyboardInterrupt",
        source="https://github.com/bottlesdevs/Bottles/pull/2260",
    ),
    HangCase(
        name="report_other_input_of_the_notebook",
        cell="""\
a = input("a: ")
print("a: ", a)
""",
        state=("slow", "stuck", "finished", "interrupted"),
        cause=("input_waiting",),
        line=(2,),
        root="main",
        kind=("input",),
        says=("input",),
        ends="interrupt",
        raises="KeyboardInterrupt",
        source="https://github.com/googlecolab/colabtools/issues/3550",
    ),
    HangCase(
        name="report_other_stale_lock_of_a_build",
        cell="""\
import os, tempfile
from torch.utils.file_baton import FileBaton

build_directory = tempfile.TemporaryDirectory()
lock = os.path.join(build_directory.name, "lock")
open(lock, "w").close()
baton = FileBaton(lock)
if not baton.try_acquire():
    baton.wait()
""",
        state=("stuck", "slow"),
        cause=("lock_never_released", "infinite_loop", None),
        line=(10,),
        root="main",
        kind=("sleep", "lock", "python", "io"),
        ends="interrupt",
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/189245",
    ),
    HangCase(
        name="report_other_pool_worker_killed",
        cell="""\
import os, signal, time
from multiprocessing import get_context

def do_something(i):
    time.sleep(0.2)
    if i == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return i

with get_context("fork").Pool(2) as pool:
    results = pool.map(do_something, range(5), chunksize=1)
print(results)
""",
        state=("stuck",),
        cause=("worker_died",),
        line=(12, 8),
        says=("memory|killed|-9|SIGKILL",),
        raises="KeyboardInterrupt",
        source="https://github.com/uqfoundation/pathos/issues/230",
    ),
    HangCase(
        name="report_other_regular_expression_that_backtracks",
        cell="""\
import re

acronym = re.compile(r"([A-Z]+[a-z]{0,1}\\.*\\s*,*)*((A|a)(c|C)(t|T))*\\s*")
statutes = ["I.P.C", "C.P.C Act", "THECODEOFCIVILPROCEDUREXXXX"[:25] + "9"]
left = [s for s in statutes if acronym.fullmatch(s)]
print(left)
""",
        ends="itself",
        state=("slow", "stuck"),
        cause=("gil_held",),
        line=(6,),
        root="main",
        source="https://github.com/OpenNyAI/Opennyai/issues/16",
    ),
    HangCase(
        name="report_other_anomaly_mode_left_on",
        cell="""\
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)
net = nn.Sequential(*[m for k in range(60) for m in (nn.Linear(8, 8), nn.Tanh())])
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(3):
    losses = 0.0
    for chunk in range(100):
        losses = losses + net(torch.randn(4, 8)).pow(2).mean()
    opt.zero_grad()
    losses.backward()
    opt.step()
torch.autograd.set_detect_anomaly(False)
""",
        after_s=1.0,
        ends="itself",
        state=("slow", "finished"),
        cause=("tracing", None),
        source="https://github.com/Xingyu-Lin/mbpo_pytorch/issues/8",
    ),
    HangCase(
        name="report_other_processes_with_all_cores_each",
        cell="""\
import time
import torch
from multiprocessing import get_context

def rollout(k):
    torch.set_num_threads(8)
    norm = torch.nn.LayerNorm(512)
    x = torch.randn(2000, 512)
    end = time.time() + 8
    while time.time() < end:
        x = norm(x) + norm(x)
    return k

torch.set_num_threads(1)
with get_context("fork").Pool(6) as pool:
    done = pool.map(rollout, range(6))
""",
        ends="itself",
        state=("slow",),
        cause=("oversubscribed",),
        line=(12, 17),
        says=("set_num_threads|OMP_NUM_THREADS",),
        source="https://github.com/pytorch/pytorch/issues/19163",
    ),
    HangCase(
        name="report_other_download_that_stalls",
        setup="""\
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
PORT = server.getsockname()[1]
held = []
def accept():
    while True:
        held.append(server.accept())
threading.Thread(target=accept, name="hub", daemon=True).start()
""",
        cell="""\
import urllib.request

def from_pretrained(name):
    url = f"http://127.0.0.1:{PORT}/{name}/tokenizer.json"
    with urllib.request.urlopen(url) as answer:
        return answer.read()

tokenizer = from_pretrained("tiny")
""",
        state=("stuck", "slow"),
        cause=("network",),
        line=(6,),
        root="main",
        kind=("io",),
        says=("timeout",),
        ends="interrupt",  # a server may still answer: no certain end
        raises="KeyboardInterrupt",
        source="https://github.com/kubernetes-sigs/inference-perf/issues/609",
    ),
    HangCase(
        name="report_other_consumer_died_before_the_producer",
        cell="""\
import torch
import torch.multiprocessing as mp

mp = mp.get_context("fork")
queue = mp.Queue(maxsize=2)

def consumer(queue):
    batch = queue.get()
    raise RuntimeError(f"cannot handle {batch}")

p = mp.Process(target=consumer, args=(queue,), name="consumer", daemon=True)
p.start()
for step in range(10):
    queue.put(step)
p.join()
""",
        state=("stuck",),
        cause=("worker_died", "queue_never_fed", "deadlock"),
        line=(10, 15),
        says=("consumer|died|exited|exit code",),
        raises="KeyboardInterrupt",
        source="https://github.com/python/cpython/issues/87971",
    ),
    HangCase(
        name="report_other_lock_taken_again_by_its_holder",
        cell="""\
import threading

class ConnectionPool:
    def __init__(self):
        self._lock = threading.Lock()
        self.connections = []
    def close(self):
        with self._lock:
            self.connections.clear()
    def request(self, name):
        with self._lock:
            self.connections.append(name)
            if len(self.connections) > 2:
                self.close()

pool = ConnectionPool()
for name in "abc":
    pool.request(name)
""",
        state=("stuck",),
        cause=("self_deadlock",),
        line=(9,),
        root="main",
        kind=("lock",),
        says=("RLock",),
        raises="KeyboardInterrupt",
        source="https://github.com/pydantic/httpx2/pull/1008",
    ),
    HangCase(
        name="report_other_sampling_loop_whose_list_never_grows",
        cell="""\
import torch

model = torch.nn.Linear(8, 8)
batch_size, num_samples = 4, 16
all_images = []
while len(all_images) * batch_size < num_samples:
    noise = torch.randn(batch_size, 8)
    with torch.no_grad():
        sample = model(noise).clamp(-1, 1)
""",
        ends="interrupt",
        state=("slow", "stuck", "interrupted", "finished"),
        cause=("infinite_loop", None),
        line=(7, 8, 9, 10),
        raises="KeyboardInterrupt",
        source="https://github.com/wangqiang9/SketchKnitter/issues/13",
    ),
    HangCase(
        name="report_other_thread_queue_without_an_end",
        cell="""\
import queue, threading
import torch

task_queue = queue.Queue(4)

def producer():
    for image in range(6):
        task_queue.put(torch.zeros(3, 4, 4))

thread = threading.Thread(target=producer, name="producer", daemon=True)
thread.start()
while True:
    task = task_queue.get()
    if task is None:
        break
""",
        state=("stuck",),
        cause=("queue_never_fed",),
        line=(14,),
        root="main",
        kind=("queue",),
        says=("None|sentinel|end|put",),
        raises="KeyboardInterrupt",
        source="https://github.com/Seanforfun/GMAN_Net_Haze_Removal/issues/3",
    ),
)
