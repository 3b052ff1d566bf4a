"""A wait for somebody who works, or who will come: it looks like a hang from the main thread alone; and such that nobody ends."""

from __future__ import annotations

from tests.hang_cases.marks import planted
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
)
