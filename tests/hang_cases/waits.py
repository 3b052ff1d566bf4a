"""A wait for somebody who works: it looks like a hang from the main thread alone."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

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
        name="join_of_a_thread_that_counts",
        cell="""
import threading


def count():
    n = 0
    while n < 60_000_000:
        n += 1


thread = threading.Thread(target=count, name="counter")
thread.start()
thread.join()
""",
        ends="itself",
        state=("slow", "finished"),
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
        name="event_with_a_timeout",
        cell="""
import threading

warm = threading.Event()
if not warm.wait(timeout=6): #!
    print("went on without")
""",
        ends="itself",
        state=("slow", "stuck"),
        root="main",
        kind=("event",),
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
        name="retries_with_a_backoff",
        cell="""
import time


def request(attempt):
    if attempt < 3:
        raise ConnectionError("busy")
    return "weights"


for attempt in range(5):
    try:
        print(request(attempt))
        break
    except ConnectionError as error:
        time.sleep(0.9 * 2**attempt) #!
""",
        after_s=1.5,
        ends="itself",
        state=("slow",),
        kind=("sleep",),
    ),
)
