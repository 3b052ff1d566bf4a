"""Waits whose end lies with somebody who does not name what is waited for, and beside them threads that only look as if they could."""

from __future__ import annotations

from tests.hang_cases.marks import planted
from tests.hang_cases.ranks import SETUP as RANKS

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="event_set_by_a_function_that_a_thread_calls_later",
        cell="""
import threading
import time

ready = threading.Event()


def finish():
    ready.set()


def warm_up():
    time.sleep(6) #!
    finish()


threading.Thread(target=warm_up, name="warmer").start()
ready.wait() #!
""",
        ends="itself",
        state=("slow",),
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
        name="queue_fed_by_a_loop_in_a_thread",
        cell="""
import asyncio
import queue
import threading

results = queue.Queue()
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()


def deliver():
    results.put(7)


loop.call_soon_threadsafe(loop.call_later, 6, deliver)
print(results.get()) #!
loop.call_soon_threadsafe(loop.stop)
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
        name="a_gauge_ticks_while_the_main_thread_waits_for_ever",
        cell="""
import queue
import threading
import time

ticks = []


def gauge():
    while len(ticks) < 1000:
        ticks.append(time.monotonic())
        time.sleep(0.2)


threading.Thread(target=gauge, name="gauge", daemon=True).start()
items = queue.Queue()
items.get() #!
""",
        cause=("queue_never_fed",),
        root="main",
        raises=STOPPED,
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
        name="queue_of_a_class_fed_by_an_inherited_method",
        cell="""
import queue
import threading
import time


class Base:
    results = queue.Queue()

    def deliver(self):
        self.results.put(1)


class Job(Base):
    def run(self):
        time.sleep(6) #!
        self.deliver()


threading.Thread(target=Job().run, name="job").start()
print(Base.results.get()) #!
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="shell_that_reads_from_its_own_child",
        cell="""
import subprocess

subprocess.run(["bash", "-c", "x=$(sleep 6); echo $x"]) #!
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="loop_over_a_flag_that_the_last_item_ends",
        cell="""
import time


def step(items):
    next(items)
    time.sleep(0.5) #!


def consume(items):
    running = True
    try:
        while running:
            step(items)
    except StopIteration:
        return


consume(iter(range(12)))
""",
        ends="itself",
        state=("slow", "finished"),
    ),
    planted(
        name="asyncio_queue_fed_by_a_reader",
        cell="""
import asyncio
import os
import threading
import time

r, w = os.pipe()
items = asyncio.Queue()
asyncio.get_running_loop().add_reader(r, lambda: items.put_nowait(os.read(r, 9)))


def write():
    time.sleep(6) #!
    os.write(w, b"x")


threading.Thread(target=write, name="writer").start()
print(await items.get()) #!
asyncio.get_running_loop().remove_reader(r)
""",
        ends="itself",
        state=("slow",),
    ),
    planted(
        name="a_gauge_ticks_while_a_process_waits_for_ever",
        cell="""
import multiprocessing
import threading
import time

context = multiprocessing.get_context("fork")
ticks = []


def gauge():
    while len(ticks) < 1000:
        ticks.append(time.monotonic())
        time.sleep(0.2)


def work(jobs):
    jobs.get() #!


threading.Thread(target=gauge, name="gauge", daemon=True).start()
process = context.Process(target=work, args=(context.Queue(),), name="worker")
process.start()
process.join()
""",
        cause=("queue_never_fed",),
        root="process worker",
        raises=STOPPED,
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
        name="one_rank_has_more_calls_in_a_group_of_its_own",
        setup=RANKS,
        cell="""
def work(rank, world_size, port):
    join_group(rank, world_size, port)
    mine = [dist.new_group([0]), dist.new_group([1])][rank]
    x = torch.ones(4)
    dist.all_reduce(x)
    for step in range(5 * rank):
        dist.all_reduce(torch.ones(2, 2), group=mine)
    if rank == 0:
        dist.broadcast(x, 0) #!
    else:
        time.sleep(6) #!
        dist.broadcast(x, 0)


launch(work)
""",
        ends="itself",
        state=("slow",),
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
