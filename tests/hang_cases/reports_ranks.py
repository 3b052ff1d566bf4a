"""Cells of people whose ranks hang, rebuilt on gloo; the truth is what the thread settled on."""

from __future__ import annotations

from tests.hang_cases.case import HangCase

__all__ = ["CASES"]

_PORT = """\
import os, socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
"""

_HEAD = """\
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

"""

CASES = (
    HangCase(
        name="report_ranks_uneven_batches",
        setup=_PORT,
        cell=_HEAD
        + """\
def train(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(2, 4) for _ in range(6 if rank == 0 else 5)]
    for x in loader:
        loss = model(x).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.barrier()

mp.start_processes(train, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("uneven_batches",),
        line=(20, 18),
        root="rank 1",
        edges=(("rank 0", "rank 1"),),
        says=("join", "batch"),
        raises="KeyboardInterrupt",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/9851",
    ),
    HangCase(
        name="report_ranks_loop_ends_by_the_clock",
        setup=_PORT,
        cell=_HEAD
        + """\
def bench(rank, world_size, mintime):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(8, 8))
    dist.barrier()
    start = time.time()
    for trial in range(1000000):
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.01)
        if time.time() - start >= mintime * (1 + rank):
            break
    timings = [None, None]
    dist.all_gather_object(timings, time.time() - start)

mp.start_processes(bench, args=(2, 0.3), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("uneven_batches", "collective_mismatch", "collective_missing"),
        line=(21, 16),
        says=("rank", "all_gather|allgather|_allgather_base|backward|batch|iterations"),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/22834",
    ),
    HangCase(
        name="report_ranks_barrier_that_one_rank_skips",
        setup=_PORT,
        cell=_HEAD
        + """\
def validate(model):
    with torch.no_grad():
        return sum(model(torch.randn(2, 4)).sum().item() for _ in range(3))

def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    for epoch in range(2):
        model(torch.randn(2, 4)).sum().backward()
        if rank == 0:
            print("validation", validate(model.module))
            dist.barrier()

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_missing", "collective_mismatch"),
        line=(21, 18),
        edges=(("rank 0", "rank 1"),),
        says=("barrier", "every rank|all ranks|each rank|if rank"),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/54059",
    ),
    HangCase(
        name="report_ranks_best_loss_known_to_rank_0_only",
        setup=_PORT,
        cell=_HEAD
        + """\
def save(model, rank):
    full = [torch.zeros_like(model.weight) for _ in range(2)]
    dist.all_gather(full, model.weight.detach())
    return full

def train(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model, best = nn.Linear(4, 1), 1.5
    for epoch in range(5):
        val_loss = torch.tensor(1.0)
        dist.reduce(val_loss, dst=0)
        val_loss = val_loss / world_size if rank == 0 else val_loss * 2
        if val_loss < best:
            best = val_loss.item()
            save(model, rank)
        dist.barrier()

mp.start_processes(train, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_mismatch", "collective_missing"),
        line=(11, 24, 25),
        says=("all_gather|allgather", "barrier"),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/77562",
    ),
    HangCase(
        name="report_ranks_world_of_two_with_one_process",
        setup=_PORT,
        cell=_HEAD
        + """\
def main_worker(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    model(torch.randn(2, 4)).sum().backward()

mp.start_processes(main_worker, args=(2,), nprocs=1, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_missing", "native_wait", "network"),
        line=(10,),
        root="rank 0",
        says=("world_size|world size|process", "2"),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/8091",
    ),
    HangCase(
        name="report_ranks_metrics_logged_on_rank_0",
        setup=_PORT,
        cell=_HEAD
        + """\
def sync(metrics):
    for name in metrics:
        dist.all_reduce(metrics[name])
    return metrics

def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
        res = {}
        if rank == 0:
            res = {"reduced_metric": torch.tensor(0.1)}
        sync(res)
        dist.broadcast(torch.zeros(2), src=0)

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_mismatch", "collective_missing"),
        line=(11, 26, 27),
        says=("all_reduce|allreduce", "broadcast"),
        raises="KeyboardInterrupt",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/7129",
    ),
    HangCase(
        name="report_ranks_one_rank_skips_its_backward",
        setup=_PORT,
        cell=_HEAD
        + """\
def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        length = 1 if (rank, step) == (1, 2) else 6
        loss = model(torch.randn(length, 4)).sum()
        if length < 4:
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.barrier()

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_mismatch", "uneven_batches", "collective_missing"),
        line=(20, 22, 18),
        says=("backward|batch|step",),
        raises="KeyboardInterrupt",
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/2468",
    ),
    HangCase(
        name="report_ranks_branch_unused_on_one_rank",
        setup=_PORT,
        cell=_HEAD
        + """\
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.boxes = nn.Linear(4, 2)
        self.masks = nn.Linear(4, 2)
    def forward(self, x, has_masks):
        h = self.trunk(x)
        out = self.boxes(h).sum()
        return out + self.masks(h).sum() if has_masks else out

def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(TwoHeads())
    for step in range(3):
        loss = model(torch.randn(2, 4), has_masks=rank == 0 or step != 1)
        loss.backward()
        dist.barrier()

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("unused_parameters",),
        line=(26, 27),
        says=("find_unused_parameters", "masks"),
        raises="KeyboardInterrupt",
        source="https://github.com/pytorch/pytorch/issues/68297",
    ),
    HangCase(
        name="report_ranks_main_process_prepares_the_data",
        setup=_PORT,
        cell=_HEAD
        + """\
def tokenize_corpus(examples):
    done = []
    for number in range(examples):
        done.append(sum(hash(str(k)) % 7 for k in range(100000)))
    return done

def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    if rank > 0:
        dist.barrier()
    else:
        tokenize_corpus(500)
        dist.barrier()
    print("rank", rank, "trains")

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        ends="itself",
        state=("slow",),
        cause=(None, "data_loading"),
        line=(11, 12, 21),
        root="rank 0",
        kind=("python",),
        edges=(("rank 1", "rank 0"),),
        source="https://github.com/hiyouga/LlamaFactory/issues/360",
    ),
    HangCase(
        name="report_ranks_one_rank_has_nothing_left_to_do",
        setup=_PORT,
        cell=_HEAD
        + """\
def program(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dist.all_reduce(torch.zeros(1))
    if rank != 2:
        dist.barrier()
    print(rank, "Done.")

mp.start_processes(program, args=(3,), nprocs=3, start_method="fork")
""",
        ends="itself",
        state=("finished", "slow"),
        cause=(None, "collective_missing", "rank_died"),
        raises="ProcessRaisedException",
        source="https://github.com/pytorch/pytorch/issues/138322",
    ),
    HangCase(
        name="report_ranks_both_send_first",
        setup=_PORT,
        cell=_HEAD
        + """\
def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mine, theirs = torch.full((1000000,), float(rank)), torch.zeros(1000000)
    dist.send(mine, dst=1 - rank)
    dist.recv(theirs, src=1 - rank)
    print(rank, theirs[0])

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("deadlock", "collective_mismatch", "collective_missing"),
        line=(13,),
        kind=("collective",),
        edges=(("rank 0", "rank 1"), ("rank 1", "rank 0")),
        says=("recv|receive", "send"),
        raises="KeyboardInterrupt",
        source="https://github.com/NVIDIA/nccl/issues/479",
    ),
    HangCase(
        name="report_ranks_uneven_batches_joined",
        setup=_PORT,
        cell=_HEAD
        + """\
def train(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(2, 4) for _ in range(6 + 3 * rank)]
    with model.join():
        for x in loader:
            opt.zero_grad()
            model(x).sum().backward()
            opt.step()
    del model
    dist.destroy_process_group()

mp.start_processes(train, args=(2,), nprocs=2, start_method="fork")
""",
        ends="itself",
        after_s=4.0,
        state=("finished", "slow"),
        source="https://github.com/pytorch/pytorch/issues/38174",
    ),
    HangCase(
        name="report_ranks_failure_ends_the_others_at_once",
        setup=_PORT,
        cell=_HEAD
        + """\
def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for job in range(3):
        if rank == 1 and job == 2:
            raise RuntimeError("scene 2 has no route")
        dist.all_reduce(torch.zeros(1))
    dist.barrier()

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        ends="itself",
        state=("finished", "slow"),
        cause=(None, "rank_died"),
        raises="ProcessRaisedException",
        source="https://github.com/tier4/Diffusion-Planner/pull/336",
    ),
    HangCase(
        name="report_ranks_sampling_through_the_wrapped_model_on_rank_0",
        setup=_PORT,
        cell=_HEAD
        + """\
def worker(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for epoch in range(2):
        model(torch.randn(3, 4)).sum().backward()
        if rank == 0:
            model(torch.randn(3, 4)).sum()
            model(torch.randn(3, 4)).sum()
        done = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(done, torch.ones(1))

mp.start_processes(worker, args=(2,), nprocs=2, start_method="fork")
""",
        state=("stuck",),
        cause=("collective_mismatch", "collective_missing"),
        line=(16, 15, 19),
        says=("broadcast|module|all_gather|allgather",),
        raises="KeyboardInterrupt",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/15860",
    ),
)
