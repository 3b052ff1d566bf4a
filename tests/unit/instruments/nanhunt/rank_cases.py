"""Trainings in two gloo ranks, for `test_ranks`: a program for ``tests.rank_job``, whose cases return plain data from each rank."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchdebug_magics
from torchdebug_magics.errors import NonFiniteError

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanReport

BAD = 2
"""The step that goes wrong."""
Loss = Callable[[int, int, torch.Tensor], torch.Tensor]
Result = dict[str, Any]


class Net(torch.nn.Module):
    """One that skips leaves its side branch out in every other call, as `find_unused_parameters` is for."""

    def __init__(self, *, skips: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.side, self.last = (
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 8),
            torch.nn.Linear(8, 1),
        )
        self.calls, self.skips, self.checkpoints = 0, skips, checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x)).relu()
        if not self.skips or self.calls % 2:
            hidden = hidden + (checkpoint(self.side, hidden, use_reentrant=True) if self.checkpoints else self.side(hidden))
        return self.last(hidden)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def square(_rank: int, _step: int, out: torch.Tensor) -> torch.Tensor:
    return (out**2).mean()


def sqrt_of_zero(rank: int, step: int, out: torch.Tensor) -> torch.Tensor:
    if rank == 1 and step == BAD:
        return torch.sqrt(out * 0).mean()
    return (out**2).mean()


def train(
    model: torch.nn.Module, rank: int, loss: Loss, *, steps: int = 5, nan_row: bool = False, after: Callable[[Any], None] | None = None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = batch(rank, step)
        if nan_row and rank == 1 and step == BAD:
            x[3, 1] = float("nan")
        optimizer.zero_grad()
        out = model(x)
        value = loss(rank, step, out)
        value.backward()
        if after is not None:
            after(model)
        optimizer.step()


def hunted(model: torch.nn.Module, run: Callable[[], None], **options: Any) -> Result:
    raised = ""
    session = torchdebug_magics.nanhunt(**options)
    try:
        with session:
            run()
    except NonFiniteError as error:
        raised = type(error).__name__
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    report: NanReport = session.report
    return {"report": report, "raised": raised, "finite": bool(torch.isfinite(weights).all()), "left": left(model)}


def left(model: torch.nn.Module) -> list[str]:
    """What a replay has left on a wrapper."""
    return [name for name in ("_pre_forward", "_post_forward") if name in vars(model)]


def averaged(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def averaged_in_one(model: torch.nn.Module) -> None:
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    flat = torch.cat([one.flatten() for one in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def born_in_backward(rank: int) -> Result:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    return hunted(model, partial(train, model, rank, sqrt_of_zero))


def static_graph(rank: int) -> Result:
    model = DistributedDataParallel(Net(checkpoints=True), static_graph=True)
    return hunted(model, partial(train, model, rank, sqrt_of_zero), layers=True)


def bad_parameter(rank: int) -> Result:
    model = DistributedDataParallel(Net())
    with torch.no_grad():
        model.module.first.weight[2, 1] = float("nan")
    return hunted(model, partial(train, model, rank, square))


def by_hand(rank: int) -> Result:
    model = Net()
    return hunted(model, partial(train, model, rank, sqrt_of_zero, after=averaged), keep_going=True)


def by_hand_in_one(rank: int) -> Result:
    model = Net()
    return hunted(model, partial(train, model, rank, sqrt_of_zero, after=averaged_in_one), keep_going=True)


def in_float16(rank: int) -> Result:
    model = torch.nn.Linear(4, 1).half()

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            (model(batch(rank, step).half()).sum() * (7000.0 if step == BAD else 1.0)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()

    return hunted(model, run)


def accumulated(rank: int) -> Result:
    model = DistributedDataParallel(Net())

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                square(rank, step, model(batch(rank, step))).backward()
            sqrt_of_zero(rank, step, model(batch(rank, step + 50))).backward()
            optimizer.step()

    return hunted(model, run)


def loss_of_all(rank: int) -> Result:
    """A loss that every rank computes from what all of them sent: NaN of rank 1 is in the loss of rank 0."""
    model = Net()

    def run() -> None:
        for step in range(4):
            out = model(batch(rank, step))
            if rank == 1 and step == BAD:
                out = torch.log(-out.abs())
            total = out.detach().sum()
            dist.all_reduce(total)
            (out.sum() * total).backward()

    return hunted(model, run, keep_going=True)


def healthy(rank: int) -> dict[str, bool]:
    """Whether a training is the same to the last bit with a replay of steps 0, 1, 3 and 7, for each kind of reducer."""
    same = {}
    for name, options in {
        "plain": {},
        "view": {"gradient_as_bucket_view": True},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }.items():
        weights = []
        for watched in (False, True):
            model = DistributedDataParallel(Net(skips=name == "unused"), **options)
            if watched:
                result = hunted(model, partial(train, model, rank, square, steps=9), layers=True)
                same[f"{name} looked"] = bool(result["report"].layers) and not result["report"].found and not result["left"]
            else:
                train(model, rank, square, steps=9)
            weights.append([one.detach().clone() for one in (*model.parameters(), *model.buffers())])
        same[name] = all(map(torch.equal, *weights))
    return same


def shapes_in_one(rank: int) -> dict[str, bool]:
    """Whether a dry run of the model in rank 0 alone leaves the training, which broadcasts buffers, as it is."""
    weights, looked = [], True
    for asks in (False, True):
        model = DistributedDataParallel(Net())

        def after(model: torch.nn.Module, asks: bool = asks) -> None:
            nonlocal looked
            for real in (False, True) if asks and rank == 0 else ():
                looked &= torchdebug_magics.shapes(model, batch(0, 0), real=real).failure is None

        train(model, rank, square, after=after)
        weights.append([one.detach().clone() for one in (*model.parameters(), *model.buffers())])
    return {"same": all(map(torch.equal, *weights)), "looked": looked}


def sqrt_of_negative(rank: int, step: int, out: torch.Tensor) -> torch.Tensor:
    if rank == 1 and step == BAD:
        return torch.sqrt(-1 - out.abs()).mean()
    return (out**2).mean()


def sharded(rank: int) -> Result:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    session = torchdebug_magics.nanhunt(keep_going=True)
    with session:
        train(model, rank, sqrt_of_negative)
    return {"report": session.report}


def sharded_with_a_bad_input(rank: int) -> Result:
    """What computes the input cannot be run again, as the call of the model is in the same step; that the input is NaN can be seen."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    session = torchdebug_magics.nanhunt(keep_going=True)
    with session:
        train(model, rank, square, nan_row=True, steps=3)
    return {"report": session.report}


def clipped(rank: int) -> Result:
    """Clipping writes the bad norm into every gradient: that is no second fault."""
    model = DistributedDataParallel(Net())

    def clip(model: torch.nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return hunted(model, partial(train, model, rank, sqrt_of_zero, after=clip, steps=3), keep_going=True)


CASES = {
    one.__name__: one
    for one in (
        born_in_backward, static_graph, bad_parameter, by_hand, by_hand_in_one, in_float16, accumulated, loss_of_all,
        healthy, shapes_in_one, sharded, sharded_with_a_bad_input, clipped,
    )
}  # fmt: skip


def main(rank: int, size: int, folder: Path) -> None:
    """Run every case on this rank of a job, and write after each what all have returned."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=dt.timedelta(seconds=30))
    results: dict[str, Result | str] = {}
    for name, case in CASES.items():
        try:
            results[name] = case(rank)
        except Exception as error:
            results[name] = repr(error)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
        dist.barrier()
