"""Nothing is wrong, whatever stands still beside it."""

from __future__ import annotations

from tests.hang_cases.marks import WARM, planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"
FINE = {"ends": "itself", "state": ("finished",)}

CASES = (
    planted(
        name="training",
        setup=WARM,
        cell="""
import time

import torch

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
begin = time.monotonic()
while time.monotonic() - begin < 5:
    loss = model(torch.randn(64, 32)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        **FINE,
    ),
    planted(
        name="prints",
        cell="""
import time

for epoch in range(12):
    print(f"epoch {epoch}: loss {1 / (epoch + 1):.3f}")
    time.sleep(0.45)
""",
        **FINE,
    ),
    planted(
        name="deadlock_of_two_threads_that_nobody_joins",
        setup=WARM,
        cell="""
import threading
import time

import torch

first, second = threading.Lock(), threading.Lock()


def take(one, other):
    with one:
        time.sleep(0.2)
        with other:
            pass


threading.Thread(target=take, args=(first, second), name="left", daemon=True).start()
threading.Thread(target=take, args=(second, first), name="right", daemon=True).start()
model = torch.nn.Linear(4, 1)
for step in range(50):
    model(torch.randn(8, 4)).sum().backward()
    time.sleep(0.1)
""",
        **FINE,
    ),
    planted(
        name="prefetch_with_a_producer_thread",
        setup=WARM,
        cell="""
import queue
import threading
import time

import torch

batches = queue.Queue(maxsize=2)


def prefetch():
    for _ in range(12):
        time.sleep(0.3)
        batches.put(torch.randn(16, 4))
    batches.put(None)


threading.Thread(target=prefetch, name="prefetch", daemon=True).start()
model = torch.nn.Linear(4, 1)
while (batch := batches.get()) is not None:
    model(batch).sum().backward()
""",
        **FINE,
    ),
    planted(
        name="stop_pressed_on_a_training",
        setup=WARM,
        cell="""
import time

import torch

weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    optimizer.zero_grad()
    (weight - 1).pow(2).sum().backward()
    optimizer.step()
    time.sleep(0.05)
""",
        ends="interrupt",
        interrupt_s=4.0,
        state=("interrupted",),
        raises=STOPPED,
    ),
    planted(
        name="signals_of_the_user",
        cell="""
import os
import signal
import time

saved = []
before_1 = signal.signal(signal.SIGUSR1, lambda number, frame: saved.append("usr1"))
before_alarm = signal.signal(signal.SIGALRM, lambda number, frame: saved.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.4, 0.4)
for step in range(16):
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.25)
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGUSR1, before_1)
signal.signal(signal.SIGALRM, before_alarm)
assert saved.count("usr1") == 16, saved
assert saved.count("alarm") > 5, saved
""",
        **FINE,
    ),
    planted(
        name="coroutines_that_take_turns",
        cell="""
import asyncio
from concurrent.futures import ThreadPoolExecutor


async def consume(queue):
    seen = []
    while (item := await queue.get()) is not None:
        seen.append(item)
    return seen


async def main():
    queue = asyncio.Queue()
    task = asyncio.create_task(consume(queue))
    for item in range(12):
        await queue.put(item)
        await asyncio.sleep(0.3)
    await queue.put(None)
    return await task


with ThreadPoolExecutor(1) as pool:
    print(pool.submit(asyncio.run, main()).result())
""",
        # What the main thread waits for is a future; the loop beside it sleeps and wakes.
        ends="itself",
        state=("finished", "slow"),
    ),
)
