"""What the ranks of these tests run: small data-parallel trainings over gloo, which meet through a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # as the first step of an optimizer does, in 3 s: once here, not in each fork
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def group(rank: int, world_size: int, store: str) -> Iterator[None]:
    """A gloo group for the time of a block."""
    distributed.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def train(rank: int, world_size: int, store: str, fault: str = "", at: int = 1, out: str = "") -> None:
    """Five steps; at step 3 something happens to rank `at`."""
    with group(rank, world_size, store):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for step in range(5):
            x = torch.rand(8, 4, generator=generator) + 1
            if rank == at and step == 3:
                happens(fault, x, f"{store}.happened")
            loss = (x.log() * model(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            average(model, world_size)
            optimizer.step()
        if out:
            torch.save(model.state_dict(), f"{out}{rank}")


def average(model: torch.nn.Module, world_size: int) -> None:
    """Of all gradients, over the ranks."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        parameter.grad /= world_size


def happens(fault: str, x: torch.Tensor, told: str) -> None:
    """`told`: the file that says so, of what the test waits for."""
    match fault:
        case "nan":
            x[2] = -1
        case "raises":
            msg = f"no such class on rank {distributed.get_rank()}"
            raise ValueError(msg)
        case "is killed":
            time.sleep(1.5)  # so that it has said where it stands
            os.kill(os.getpid(), signal.SIGKILL)
        case "leaves":
            os._exit(3)
        case "hangs":
            Path(told).touch()
            time.sleep(60)


def train_alone(rank: int, fault: str = "") -> None:
    """Without a group: three steps of its own."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.rand(8, 4) + 1
        if rank == 1 and step == 1:
            happens(fault, x, "")
        (x.log() * model(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def raise_each(rank: int) -> None:
    """A different error on each rank."""
    torch.zeros(1)
    raise (ValueError, KeyError, OSError)[rank](f"of rank {rank}")


def launch_more(rank: int, world_size: int, store: str) -> None:
    """A launcher that is launched itself: rank 0 starts the other one."""
    del rank
    other = multiprocessing.get_context("fork").Process(target=train, args=(1, world_size, store, "nan"))
    other.start()
    try:
        train(0, world_size, store)
    finally:
        other.join()


def load(loader_workers: int = 2) -> None:
    """A training whose data come from worker processes."""
    data = DataLoader(TensorDataset(torch.rand(16, 4)), batch_size=4, num_workers=loader_workers, multiprocessing_context="fork")
    model = torch.nn.Linear(4, 1)
    for (x,) in data:
        model(x).mean().backward()


def square(number: int) -> int:
    return number * number


def tensors(number: int) -> Any:
    """What a helper computes."""
    return (torch.arange(number) ** 2).sum().item()


def train_unevenly(rank: int, world_size: int, store: str, what: str) -> None:
    """Rank 1 has larger batches, or keeps what it computes."""
    with group(rank, world_size, store):
        model, kept = torch.nn.Linear(256, 256), []
        for _ in range(8):
            rows = 24 if rank == 1 and what == "shapes" else 8
            rows *= 1024 if what == "memory" else 1
            out = model(torch.rand(rows, 256))
            if rank == 1 and what == "memory":
                kept.append(out.detach())
            out.mean().backward()
            average(model, world_size)


def run_out(rank: int, store: str) -> None:
    """Rank 0 has six batches, and rank 1 has five: their group is never left."""
    distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for batch in torch.randn(11, 2, 4)[rank::2]:
        model(batch).mean().backward()
    distributed.barrier()


def ask(answered_s: float | None = None) -> None:
    """Wait at a prompt; `answered_s`: after so long something is typed."""
    reading, writing = os.pipe()
    sys.stdin = os.fdopen(reading)
    if answered_s is not None:
        threading.Timer(answered_s, os.write, (writing, b"yes\n")).start()
    input()


def step_slowly() -> None:
    """Eight steps of an optimizer in two seconds."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    for _ in range(8):
        time.sleep(0.25)
        optimizer.step()


def take_twice() -> None:
    """Wait for a lock that nobody releases."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def train_wrapped(rank: int, world_size: int, store: str) -> None:
    """Under DistributedDataParallel all ranks see the NaN of one at the same step."""
    with group(rank, world_size, store):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            x = torch.rand(8, 4) + 1
            if rank == 1 and step == 2:
                x[2] = -1
            loss = (x.log() * model(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del model  # a group that a model outlives may wait for ever
