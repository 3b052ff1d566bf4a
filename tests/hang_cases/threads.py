"""Threads, locks and coroutines of one process; a kernel's own loop runs already, so that a notebook runs coroutines in a thread."""

from __future__ import annotations

from tests.hang_cases.marks import planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
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
)
