"""Threads, locks and coroutines of one process; a kernel's own loop runs already, so that a notebook runs coroutines in a thread."""

from __future__ import annotations

from tests.hang_cases.marks import planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

CASES = (
    planted(
        name="finalizer_takes_a_lock_that_is_held",
        cell="""
import threading

registry_lock = threading.Lock()
registry = {}


class Buffer:
    def __init__(self, key):
        self.key = key
        with registry_lock:
            registry[key] = bytearray(16)

    def __del__(self):
        with registry_lock: #!
            registry.pop(self.key, None)


current = Buffer("a")
with registry_lock:
    size = sum(len(part) for part in registry.values())
    current = None
""",
        cause=("self_deadlock",),
        root="main",
        kind=("lock",),
        raises="KeyboardInterrupt|",  # an exception in a finalizer is only printed
    ),
    planted(
        name="two_threads_two_locks",
        cell="""
import threading
import time

weights = threading.Lock()
metrics = threading.Lock()


def save():
    with weights:
        time.sleep(0.3)
        with metrics: #!
            pass


def report():
    with metrics:
        time.sleep(0.3)
        with weights: #!
            pass


threads = [threading.Thread(target=save, name="saver", daemon=True), threading.Thread(target=report, name="reporter", daemon=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
        cause=("deadlock",),
        root="thread saver|thread reporter",
        kind=("lock",),
        edges=(("main", "thread saver"), ("thread saver", "thread reporter"), ("thread reporter", "thread saver")),
        raises=STOPPED,
    ),
    planted(
        name="import_that_joins_an_importer",
        files=(
            (
                "plugin_registry.py",
                """import threading

FOUND = []


def discover():
    from plugin_registry import FOUND

    FOUND.append("adam")


finder = threading.Thread(target=discover, name="finder", daemon=True)
finder.start()
finder.join()
""",
            ),
        ),
        cell="""
import sys

sys.path.insert(0, "")
import plugin_registry

print(plugin_registry.FOUND)
""",
        cause=("deadlock",),
        edges=(("main", "thread finder"), ("thread finder", "main")),
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
        name="early_return_keeps_the_lock",
        cell="""
import threading


class Cache:
    def __init__(self):
        self.lock = threading.Lock()
        self.items = {}

    def get(self, key):
        self.lock.acquire() #!
        if key in self.items:
            return self.items[key]
        self.items[key] = key * 2
        self.lock.release()
        return self.items[key]


cache = Cache()
values = [cache.get(key) for key in (1, 2, 3, 1, 4)]
""",
        cause=("self_deadlock", "lock_never_released"),
        root="main",
        kind=("lock",),
        where="self.lock.acquire()",
        raises=STOPPED,
    ),
)
