"""Coroutines; a kernel's own loop runs already, so that a notebook runs them in a thread."""

from __future__ import annotations

from tests.hang_cases.marks import planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="task_awaits_an_event_that_nobody_sets",
        cell="""
import asyncio
import threading


async def train(ready):
    await ready.wait() #!
    return 0.1


async def main():
    ready = asyncio.Event()
    task = asyncio.create_task(train(ready), name="train")
    await asyncio.sleep(0.1)
    return await task


thread = threading.Thread(target=lambda: asyncio.run(main()), name="loop", daemon=True)
thread.start()
thread.join()
""",
        cause=("event_never_set",),
        where="ready.wait()",
        raises=STOPPED,
    ),
    planted(
        name="asyncio_lock_taken_twice",
        cell="""
import asyncio
from concurrent.futures import ThreadPoolExecutor


class Store:
    def __init__(self):
        self.lock = asyncio.Lock()
        self.rows = []

    async def add(self, row):
        async with self.lock:
            self.rows.append(row)
            if len(self.rows) > 2:
                await self.flush()

    async def flush(self):
        async with self.lock: #!
            self.rows.clear()


async def main():
    store = Store()
    for row in range(5):
        await store.add(row)


with ThreadPoolExecutor(1, thread_name_prefix="aio") as pool:
    pool.submit(asyncio.run, main()).result()
""",
        cause=("self_deadlock", "lock_never_released", "deadlock"),
        where="self.lock",
        raises=STOPPED,
    ),
    planted(
        name="gather_with_a_consumer_of_an_empty_queue",
        cell="""
import asyncio
import threading


async def produce(queue):
    for item in range(3):
        await queue.put(item)
        await asyncio.sleep(0.05)


async def consume(queue, name):
    taken = []
    while len(taken) < 2:
        taken.append(await queue.get()) #!
    return name, taken


async def main():
    queue = asyncio.Queue()
    return await asyncio.gather(produce(queue), consume(queue, "a"), consume(queue, "b"))


runner = threading.Thread(target=lambda: asyncio.run(main()), name="runner", daemon=True)
runner.start()
runner.join()
""",
        cause=("queue_never_fed",),
        where="queue.get()",
        raises=STOPPED,
    ),
    planted(
        name="await_in_the_cell_itself",
        cell="""
import asyncio

weights_ready = asyncio.Event()


async def load():
    await weights_ready.wait() #!
    return "weights"


print(await load()) #!
""",
        cause=("event_never_set",),
        raises="KeyboardInterrupt|CancelledError",
    ),
    planted(
        name="await_of_tasks_that_go_on",
        cell="""
import asyncio


async def evaluate(fold):
    for step in range(10):
        await asyncio.sleep(0.4)
    return fold


print(await asyncio.gather(*(evaluate(fold) for fold in range(3))))
""",
        ends="itself",
        state=("finished", "slow"),
    ),
)
