"""Ranks of torch.distributed on gloo, started from a cell."""

from __future__ import annotations

from tests.hang_cases.marks import planted

__all__ = ["CASES"]

STOPPED = "KeyboardInterrupt"

# The group's own timeout is far away, so that only what the magic does ends a wait.
SETUP = """
import datetime
import os
import socket
import time

import torch
import torch._dynamo  # which DDP imports: once here, not in each rank
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_group(rank, world_size, port):
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=limit)
    torch.manual_seed(0)


def launch(work, world_size=2, *more):
    port = free_port()
    mp.start_processes(work, args=(world_size, port, *more), nprocs=world_size, start_method="fork")
"""

# For the cases in which the cell starts the processes itself.
START = """
port = free_port()
ranks = [mp.get_context("fork").Process(target=work, args=(rank, 2, port), name=f"rank-{rank}") for rank in range(2)]
for process in ranks:
    process.start()
for process in ranks:
    process.join()
"""

CASES = (
    planted(
        name="only_rank_0_enters_the_barrier",
        setup=SETUP,
        cell="""
def work(rank, world_size, port, orders):
    join_group(rank, world_size, port)
    x = torch.ones(4) * rank
    dist.all_reduce(x)
    if rank == 0:
        dist.barrier() #!
        print("saved")
    else:
        orders.get() #!


launch(work, 2, mp.get_context("fork").Queue())
""",
        cause=("collective_missing", "queue_never_fed"),
        root="rank 1",
        edges=(("rank 0", "rank 1"),),
        says=("barrier",),
        raises=STOPPED,
    ),
    planted(
        name="both_ranks_receive_first",
        setup=SETUP,
        cell=f"""
def work(rank, world_size, port):
    join_group(rank, world_size, port)
    mine, theirs = torch.full((8,), float(rank)), torch.empty(8)
    dist.recv(theirs, src=1 - rank) #!
    dist.send(mine, dst=1 - rank)

{START}""",
        cause=("deadlock", "collective_mismatch"),
        root="rank 0|rank 1",
        kind=("collective",),
        where="dist.recv",
        edges=(("rank 0", "rank 1"), ("rank 1", "rank 0")),
        raises=STOPPED,
    ),
    planted(
        name="shapes_that_differ",
        setup=SETUP,
        cell=f"""
def work(rank, world_size, port):
    join_group(rank, world_size, port)
    for step in range(5):
        rows = 4 if step < 4 else 3 + rank
        embeddings = torch.randn(rows, 16)
        dist.all_reduce(embeddings)
        time.sleep(0.5)

{START}""",
        ends="itself",
        state=("finished", "slow"),
        cause=("collective_mismatch", "rank_died"),
        says=("3, 16|3x16|3 x 16|48|64|SIGABRT",),  # gloo may end a rank before it can say more
    ),
    planted(
        name="parameters_unused_on_one_rank",
        setup=SETUP,
        cell=f"""
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, x, deep):
        x = self.body(x)
        return self.extra(x) if deep else x


def work(rank, world_size, port):
    join_group(rank, world_size, port)
    model = DDP(Heads())
    for step in range(4):
        model.zero_grad()
        deep = rank == 0 or step != 1
        model(torch.randn(2, 4), deep).sum().backward() #!
    torch.save({{}}, os.devnull)


def guarded(rank, world_size, port):
    try:
        work(rank, world_size, port)
    finally:
        mp.get_context("fork").Event().wait() #!


{START.replace("target=work", "target=guarded")}""",
        cause=("unused_parameters",),
        says=("extra",),
        raises=STOPPED,
    ),
    planted(
        name="rank_that_raises_under_spawned_context",
        setup=SETUP,
        cell="""
def work(rank, world_size, port):
    join_group(rank, world_size, port)
    if rank == 1:
        raise ValueError("label 10 is out of range")
    dist.barrier()


launch(work)
""",
        ends="itself",
        state=("finished", "slow"),
        cause=("rank_died", None),
        raises="ProcessRaisedException",
    ),
    planted(
        name="the_kernel_is_rank_0",
        setup=SETUP,
        cell="""
def peer(port):
    join_group(1, 2, port)
    time.sleep(600) #!


port = free_port()
helper = mp.get_context("fork").Process(target=peer, args=(port,), name="helper", daemon=True)
helper.start()
join_group(0, 2, port)
try:
    dist.all_reduce(torch.ones(2)) #!
finally:
    dist.destroy_process_group()
""",
        state=("stuck", "slow"),
        ends="interrupt",
        interrupt_s=7.0,
        cause=("collective_missing", None),
        raises="KeyboardInterrupt|RuntimeError|DistBackendError",
    ),
)
