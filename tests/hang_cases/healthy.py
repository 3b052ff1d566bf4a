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
