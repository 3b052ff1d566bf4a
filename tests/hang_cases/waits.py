"""A wait for somebody who works, or who will come: it looks like a hang from the main thread alone; and such that nobody ends."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted
from tests.hang_cases.ranks import SETUP as RANKS

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="lock_of_a_thread_that_sleeps",
        cell="""
import threading
import time

disk = threading.Lock()
taken = threading.Event()


def write():
    with disk:
        taken.set()
        time.sleep(6) #!


threading.Thread(target=write, name="writer").start()
taken.wait()
with disk: #!
    print("read")
""",
        ends="itself",
        state=("slow",),
        kind=("sleep", "lock"),
    ),
    planted(
        name="lock_of_a_thread_that_works",
        setup=WARM,
        cell="""
import threading
import time

import torch

model_lock = threading.RLock()
taken = threading.Event()


def quantize():
    with model_lock:
        taken.set()
        x = torch.randn(200, 200)
        end = time.monotonic() + 6
        while time.monotonic() < end:
            x = torch.tanh(x @ x)


threading.Thread(target=quantize, name="quantizer").start()
taken.wait()
with model_lock:
    print("evaluate")
""",
        ends="itself",
        state=("slow", "finished"),
    ),
    planted(
        name="queue_with_a_slow_producer",
        cell="""
import queue
import threading
import time

frames = queue.Queue()


def grab():
    for index in range(3):
        time.sleep(2.6) #!
        frames.put(index)
    frames.put(None)


threading.Thread(target=grab, name="camera").start()
while frames.get() is not None: #!
    pass
""",
        after_s=1.5,
        ends="itself",
        state=("slow",),
        cause=(None, "data_loading"),
    ),
    planted(
        name="future_that_comes_late",
        cell="""
import time
from concurrent.futures import ThreadPoolExecutor


def fetch(name):
    time.sleep(1.0 if name == "train" else 5.5) #!
    return name


with ThreadPoolExecutor(2, thread_name_prefix="fetch") as pool:
    print([future.result() for future in [pool.submit(fetch, name) for name in ("train", "test")]]) #!
""",
        ends="itself",
        state=("slow",),
        edges=(("main", "thread fetch_1"),),
    ),
    planted(
        name="asyncio_that_sleeps",
        cell="""
import asyncio
import threading


async def main():
    await asyncio.gather(asyncio.sleep(0.5), asyncio.sleep(6)) #!


thread = threading.Thread(target=lambda: asyncio.run(main()), name="loop")
thread.start()
thread.join()
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="prompt_in_the_main_thread",
        cell="""
print("delete the checkpoints?")
answer = input("y/n ") #!
""",
        ends="interrupt",
        interrupt_s=5.0,
        state=("slow", "interrupted", "finished"),
        cause=("input_waiting", None),
        root="main",
        kind=("input",),
        raises=STOPPED,
    ),
    planted(
        name="lock_acquired_by_a_helper_and_released_later",
        cell="""
import threading
import time

lock = threading.Lock()
taken = threading.Event()


class Cache:
    def open(self):
        lock.acquire()

    def close(self):
        lock.release()

    def refresh(self):
        self.open()
        taken.set()
        end = time.monotonic() + 6
        while time.monotonic() < end: #!
            sum(range(1000)) #!
        self.close()


threading.Thread(target=Cache().refresh, name="refresher").start()
taken.wait()
with lock: #!
    print("cached")
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="event_set_by_a_callback_of_a_future",
        cell="""
import threading
import time
from concurrent.futures import ThreadPoolExecutor

done = threading.Event()
pool = ThreadPoolExecutor(1)
future = pool.submit(time.sleep, 6)
future.add_done_callback(lambda _: done.set())
done.wait() #!
pool.shutdown()
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="asyncio_event_set_by_call_later",
        cell="""
import asyncio

done = asyncio.Event()
asyncio.get_running_loop().call_later(6, done.set)
await done.wait() #!
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="process_queue_fed_by_a_thread_of_the_parent",
        cell="""
import multiprocessing
import threading
import time

context = multiprocessing.get_context("fork")
jobs = context.Queue()


def work():
    print(jobs.get()) #!


def feed():
    time.sleep(6) #!
    jobs.put("job")


process = context.Process(target=work, name="worker")
process.start()
threading.Thread(target=feed, name="feeder").start()
process.join() #!
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="a_producer_that_an_exception_has_ended",
        cell="""
import queue
import threading

batches = queue.Queue(maxsize=2)


def produce(paths):
    for path in paths:
        batches.put(path["label"])


threading.Thread(target=produce, args=([{"label": 1}, {"lable": 2}],), name="producer", daemon=True).start()
for _ in range(2):
    print(batches.get()) #!
""",
        cause=("queue_never_fed",),
        root="main",
        says=("fix the error in thread producer",),
        raises=STOPPED,
    ),
    planted(
        name="lock_between_processes_that_the_other_one_holds",
        cell="""
import multiprocessing
import time

context = multiprocessing.get_context("fork")
lock, taken = context.Lock(), context.Event()


def work():
    with lock:
        taken.set()
        end = time.monotonic() + 6
        while time.monotonic() < end: #!
            sum(range(1000)) #!


process = context.Process(target=work, name="worker")
process.start()
taken.wait()
with lock: #!
    print("mine")
process.join()
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="a_lock_of_a_thread_that_has_ended_while_another_sleeps",
        cell="""
import threading
import time

files = threading.Lock()
other = threading.Lock()


def grab():
    files.acquire()


def nap():
    with other:
        time.sleep(40)


thief = threading.Thread(target=grab, name="thief")
thief.start()
thief.join()
threading.Thread(target=nap, name="napper", daemon=True).start()
with files: #!
    print("mine")
""",
        cause=("lock_never_released",),
        root="main",
        raises=STOPPED,
    ),
    planted(
        name="two_groups_in_another_order",
        setup=RANKS,
        cell="""
def work(rank, world_size, port):
    join_group(rank, world_size, port)
    weights = dist.new_group([0, 1])
    metrics = dist.new_group([0, 1])
    x = torch.ones(4)
    for step in range(3):
        dist.all_reduce(x, group=metrics)
    first, second = (weights, metrics) if rank == 0 else (metrics, weights)
    dist.all_reduce(x, group=first) #!
    dist.all_reduce(x, group=second)


launch(work)
""",
        cause=("collective_mismatch",),
        raises=STOPPED,
    ),
    planted(
        name="one_rank_of_a_subgroup_never_comes",
        setup=RANKS,
        cell="""
def work(rank, world_size, port, orders):
    join_group(rank, world_size, port)
    pair = dist.new_group([0, 2])
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 0:
        dist.all_reduce(x, group=pair) #!
    elif rank == 2:
        orders.get() #!
    else:
        dist.barrier() #!


launch(work, 3, mp.get_context("fork").Queue())
""",
        cause=("collective_missing", "queue_never_fed"),
        root="rank 2",
        raises=STOPPED,
    ),
)
