"""Processes that a cell starts: multiprocessing, pools, pipes, subprocess."""

from __future__ import annotations

from tests.hang_cases.marks import planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
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
        name="joined_before_the_queue_is_emptied",
        cell="""
import multiprocessing as mp

context = mp.get_context("fork")
results = context.Queue()


def produce():
    results.put(bytes(4_000_000))


child = context.Process(target=produce, name="producer")
child.start()
child.join() #!
payload = results.get()
""",
        cause=("deadlock",),
        edges=(("main", "process producer"),),
        says=("get|queue|empt",),
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
        name="broken_process_pool",
        cell="""
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def decode(index):
    if index == 3:
        os._exit(7)
    return index


with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
    print(list(pool.map(decode, range(6))))
""",
        ends="itself",
        state=("finished",),
        cause=("worker_died", None),
        raises="BrokenProcessPool",
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
        name="child_that_ignores_sigterm",
        cell="""
import multiprocessing as mp
import signal
import threading


def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Event().wait() #!


child = mp.get_context("fork").Process(target=stubborn, name="stubborn")
child.start()
child.join()
""",
        cause=("event_never_set",),
        root="process stubborn",
        kind=("event",),
        edges=(("main", "process stubborn"),),
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
        name="output_of_a_subprocess_that_nobody_reads",
        cell="""
import subprocess
import sys

script = "import sys\\nfor step in range(20000): print('step', step, 'loss', 0.1)"
process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
process.wait() #!
print(process.stdout.read()[-40:])
""",
        cause=("deadlock", "native_wait"),
        says=("pipe|communicate|stdout",),
        raises=STOPPED,
    ),
    planted(
        name="subprocess_that_waits_for_the_end_of_its_input",
        cell="""
import subprocess

sort = subprocess.Popen(["sort"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
sort.stdin.write("b\\na\\n")
sort.stdin.flush()
lines = sort.stdout.read() #!
""",
        cause=("deadlock", "native_wait"),
        raises=STOPPED,
    ),
    planted(
        name="child_that_sleeps",
        cell="""
import multiprocessing as mp
import time


def nap(seconds):
    time.sleep(seconds) #!


child = mp.get_context("fork").Process(target=nap, args=(6,), name="sleeper")
child.start()
child.join()
""",
        ends="itself",
        state=("slow",),
        root="process sleeper",
        kind=("sleep",),
        edges=(("main", "process sleeper"),),
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
        name="child_that_works",
        cell="""
import multiprocessing as mp
import time


def count(seconds):
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += 1


child = mp.get_context("fork").Process(target=count, args=(6,), name="counter")
child.start()
child.join()
""",
        ends="itself",
        state=("slow", "finished"),
    ),
    planted(
        name="zombie_beside_a_sleep",
        cell="""
import os
import time

pid = os.fork()
if pid == 0:
    os._exit(0)
time.sleep(5) #!
os.waitpid(pid, 0)
""",
        ends="itself",
        state=("slow",),
        root="main",
        kind=("sleep",),
    ),
    planted(
        name="pool_with_unequal_tasks",
        cell="""
import multiprocessing as mp
import time


def fold(seconds):
    time.sleep(seconds) #!
    return seconds


with mp.get_context("fork").Pool(3) as pool:
    print(pool.map(fold, [0.2, 5.0, 0.3, 0.1, 0.2], chunksize=1)) #!
""",
        ends="itself",
        state=("slow",),
    ),
)
