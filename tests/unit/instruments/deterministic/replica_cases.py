"""Trainings on two gloo ranks: planted faults between replicas, and healthy ones. Each runs on both ranks and returns its model."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DDP = DistributedDataParallel
Trained = Callable[[int], nn.Module]


class Expected(NamedTuple):
    kind: str
    step: int | None = None
    tensor: str | None = None
    source: str = ""
    """What the line holds."""
    fix: str = ""
    """What the fix holds."""


PLANTED: dict[str, tuple[Trained, Expected]] = {}
HEALTHY: dict[str, Trained] = {}


def planted(expected: Expected) -> Callable[[Trained], Trained]:
    def add(case: Trained) -> Trained:
        PLANTED[case.__name__] = case, expected
        return case

    return add


def healthy(case: Trained) -> Trained:
    HEALTHY[case.__name__] = case
    return case


def optimizers_anew(model: nn.Module, rank: int) -> None:
    """As ranks do not free them at the same time."""
    kept = []
    for _ in range(4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept += [optimizer] * rank
        train(model, sharded(rank), optimizer, steps=5)
        del optimizer


def data(rows: int = 64) -> TensorDataset:
    inputs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def sharded(rank: int, size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=size, sampler=DistributedSampler(data(), num_replicas=2, rank=rank))


def net(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), *extra, nn.ReLU(), nn.Linear(8, 1))


def average(model: nn.Module, but: Iterable[str] = ()) -> None:
    for name, one in model.named_parameters():
        if one.grad is not None and name not in but:
            dist.all_reduce(one.grad)
            one.grad /= 2


def train(
    model: nn.Module, loader: Iterable[Any], optimizer: Any = None, *, steps: int = 6, before: Any = None, after: Any = None
) -> nn.Module:
    """The loop of every case that needs none of its own."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if before is not None:
            before()
        optimizer.step()
        if after is not None:
            after(step)
    return model


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)


# Planted --------------------------------------------------------------------------------------------------------------------


@planted(Expected("same_batch", 0, "", "model(torch.randn"))
def draws_in_the_loop(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    return model


@planted(Expected("same_batch", 0, ""))
def numpy_seeded_alike_by_the_user(rank: int) -> nn.Module:
    seeded()
    np.random.seed(3)  # noqa: NPY002 - as users do
    model = net()

    def batches() -> Iterator[Any]:
        while True:
            x = torch.from_numpy(np.random.randn(4, 4).astype("float32"))  # noqa: NPY002
            yield x, x.sum(1, keepdim=True)

    return train(model, batches(), before=lambda: average(model))


@planted(Expected("initial_weights", 0, "0.weight", "nn.Sequential"))
def seed_by_rank_without_broadcast(rank: int) -> nn.Module:
    seeded(rank)
    model = net()
    return train(model, sharded(rank), before=lambda: average(model))


@planted(Expected("initial_weights", 0, "0.weight", "DDP(net())"))
def seed_by_rank_before_ddp(rank: int) -> nn.Module:
    seeded(rank)
    return train(DDP(net()), sharded(rank))


@planted(Expected("initial_weights", 0, "0.weight", "DDP(model)"))
def ema_copied_before_ddp(rank: int) -> nn.Module:
    seeded(rank)
    model = net()
    ema = copy.deepcopy(model)

    def follow(_step: int) -> None:
        with torch.no_grad():
            for one, other in zip(ema.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)

    return train(DDP(model), sharded(rank), after=follow)


@planted(Expected("replicas_part", 1, "2.bias", "optimizer.step()"))
def one_parameter_not_averaged(rank: int) -> nn.Module:
    seeded()
    model = net()
    return train(model, sharded(rank), before=lambda: average(model, but=["2.bias"]))


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y if self.extra is None else y + self.extra(x)


@planted(Expected("replicas_part", 1, "extra.weight", "optimizer.step()"))
def layer_added_after_ddp(rank: int) -> nn.Module:
    seeded()
    model = DDP(WithExtra())
    model.module.extra = nn.Linear(4, 1)
    return train(model, sharded(rank))


def with_head(rank: int, head: nn.Module, *, is_averaged: bool = False) -> nn.Module:
    """A loop over a model under DDP, and a head that is not."""
    body = DDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for x, y in sharded(rank):
        optimizer.zero_grad()
        nn.functional.mse_loss(head(body(x)), y).backward()
        if is_averaged:
            average(head)
        optimizer.step()
    return nn.ModuleList([body, head])


@planted(Expected("replicas_part", 1, "0.weight", "optimizer.step()", "outside `no_sync()`"))
def no_sync_for_ever(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    with model.no_sync():
        return train(model, sharded(rank))


@planted(Expected("replicas_part", 1, "0.weight", "optimizer.step()", "the same optimizer options"))
def another_rate_on_one_rank(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    return train(model, sharded(rank), torch.optim.Adam(model.parameters(), lr=0.01 if rank else 0.02))


@planted(Expected("replicas_part", 1, "0.weight", "optimizer.step()"))
def weight_decay_by_rank(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    return train(model, sharded(rank), torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1 * rank))


@planted(Expected("replicas_part", 4, "2.weight", "optimizer.step()"))
def one_rank_resets_a_layer(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())

    def reset(step: int) -> None:
        if rank == 1 and step == 2:
            with torch.no_grad():
                model.module[2].weight.zero_()

    return train(model, sharded(rank), after=reset)


@planted(Expected("replicas_part", 1, "0.weight", "optimizer.step()"))
def clipped_on_one_rank_after_averaging(rank: int) -> nn.Module:
    seeded()
    model = net()

    def step() -> None:
        average(model)
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    return train(model, sharded(rank), before=step)


@planted(Expected("replicas_part", 0, "2.bias", "optimizer.step()"))
def checkpoint_loaded_on_rank_0_after_ddp(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    if rank == 0:
        model.load_state_dict({**model.state_dict(), "module.2.bias": torch.ones(1)})
    return train(model, sharded(rank))


@planted(Expected("initial_weights", 0, "2.bias", "DDP(model)"))
def checkpoint_loaded_on_rank_0_before_ddp(rank: int) -> nn.Module:
    seeded()
    model = net()
    if rank == 0:
        model.load_state_dict({**model.state_dict(), "2.bias": torch.ones(1)})
    return train(DDP(model), sharded(rank))


@planted(Expected("buffers_drift", 6, "1.running_mean", "model(x)"))
def batch_norm_by_rank(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net(nn.BatchNorm1d(8)), broadcast_buffers=False), sharded(rank))


@planted(Expected("buffers_drift", 6, "1.running_mean", "model(x)"))
def batch_norm_in_a_manual_loop(rank: int) -> nn.Module:
    seeded()
    model = net(nn.BatchNorm1d(8))
    return train(model, sharded(rank), before=lambda: average(model))


@planted(Expected("same_batch", 0, "", "in zip(range(steps), loader", "the same `seed`"))
def sampler_seeded_by_rank(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net()), DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), 2, rank, seed=rank)))


@planted(Expected("same_batch", 0, "", "in zip(range(steps), loader", "remove `rank=`"))
def sampler_of_rank_0_on_all(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net()), DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), 2, 0)))


@planted(Expected("same_batch", 0, "", "in zip(range(steps), loader", "DistributedSampler(dataset)"))
def every_rank_shuffles_all(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    generator = torch.Generator().manual_seed(rank)
    return train(model, DataLoader(data(), batch_size=4, shuffle=True, generator=generator))


@planted(Expected("replicas_part", 1, "0.weight", "optimizer.step()", "through its wrapper"))
def forward_of_the_module(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    return train(model.module, sharded(rank))


# Healthy --------------------------------------------------------------------------------------------------------------------


@healthy
def ddp_with_a_distributed_sampler(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net()), sharded(rank))


@planted(Expected("same_batch", 0, "", "in zip(range(steps), loader", "set_epoch(epoch)"))
def sampler_without_set_epoch(rank: int) -> nn.Module:
    seeded()
    model, loader = DDP(net()), sharded(rank)
    for _ in range(3):
        train(model, loader)
    return model


@healthy
def sampler_with_set_epoch(rank: int) -> nn.Module:
    seeded()
    model, loader = DDP(net()), sharded(rank)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(model, loader, steps=8)
    return model


@healthy
def the_first_batch_again_and_again(rank: int) -> nn.Module:
    seeded()
    loader = sharded(rank)
    return train(DDP(net()), (next(iter(loader)) for _ in range(5)))


@healthy
def a_shard_of_its_own_shuffled(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    part = torch.utils.data.Subset(data(), range(rank, 64, 2))
    return train(model, DataLoader(part, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)))


@healthy
def an_optimizer_for_each_epoch(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    optimizers_anew(model, rank)
    return model


@healthy
def two_optimizers_for_one_model(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model.module[0], model.module[2]))
    return train(model, sharded(rank), first, before=second.step, after=lambda _: second.zero_grad())


@healthy
def seed_by_rank_after_the_model(rank: int) -> nn.Module:
    seeded()
    model = DDP(net(nn.Dropout(0.5)))
    seeded(100 + rank)
    return train(model, ((x := torch.randn(4, 4), x.sum(1, keepdim=True)) for _ in range(6)))


@healthy
def averaged_by_hand(rank: int) -> nn.Module:
    seeded()
    model = net()
    return train(model, sharded(rank), before=lambda: average(model))


@healthy
def averaged_by_hand_after_a_broadcast(rank: int) -> nn.Module:
    seeded(rank)
    model = net()
    for one in model.parameters():
        dist.broadcast(one.data, src=0)
    return train(model, sharded(rank), torch.optim.Adam(model.parameters()), before=lambda: average(model))


@healthy
def averaged_in_one_flat_tensor(rank: int) -> nn.Module:
    seeded()
    model = net()

    def step() -> None:
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat)
        for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            one.copy_(part.view_as(one) / 2)

    return train(model, sharded(rank), before=step)


@healthy
def local_sgd(rank: int) -> nn.Module:
    seeded()
    model = net()
    for one in model.parameters():
        dist.broadcast(one.data, 0)

    def meet(step: int) -> None:
        if step % 3 == 2:
            for one in model.parameters():
                dist.all_reduce(one.data)
                one.data /= 2

    return train(model, sharded(rank), steps=9, after=meet)


class SyncedNorm(nn.BatchNorm1d):
    """As SyncBatchNorm, which is for GPUs alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.running_mean is not None:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            self.running_mean.lerp_(mean / 2, 0.1)
        return x - x.mean(0)


@healthy
def synced_batch_norm(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net(SyncedNorm(8, affine=False)), broadcast_buffers=False), sharded(rank))


@healthy
def batch_norm_of_rank_0(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net(nn.BatchNorm1d(8))), sharded(rank))


@healthy
def batch_norm_averaged_at_the_end(rank: int) -> nn.Module:
    seeded()
    model = DDP(net(nn.BatchNorm1d(8)), broadcast_buffers=False)
    train(model, sharded(rank))
    for one in model.buffers():
        dist.broadcast(one, 0)
    return model


@healthy
def accumulation(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters())
    for step, (x, y) in enumerate(sharded(rank)):
        if step % 2:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
    return model


@healthy
def bfloat16(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in sharded(rank):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@healthy
def frozen_backbone(rank: int) -> nn.Module:
    seeded()
    model = net()
    model[0].requires_grad_(False)
    return train(DDP(model), sharded(rank), torch.optim.SGD(model[2].parameters(), lr=0.1))


@healthy
def frozen_backbone_by_hand(rank: int) -> nn.Module:
    seeded()
    model = net()
    model[0].requires_grad_(False)
    return train(model, sharded(rank), torch.optim.SGD(model[2].parameters(), lr=0.1), before=lambda: average(model))


@healthy
def stages_of_a_pipeline(rank: int) -> nn.Module:
    seeded(rank)
    stage = net() if rank else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=8):
        optimizer.zero_grad()
        if rank == 0:
            out = stage(x)
            dist.send(out.detach(), 1)
            dist.recv(gradient := torch.empty_like(out), 1)
            out.backward(gradient)
        else:
            dist.recv(given := torch.empty(len(x), 4), 0)
            nn.functional.mse_loss(stage(given.requires_grad_()), y).backward()
            dist.send(given.grad, 0)
        optimizer.step()
    return stage


class Columns(torch.autograd.Function):
    """What comes in is the same on all ranks, and so is its gradient the sum over them."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        dist.all_reduce(gradient := gradient.clone())
        return gradient


class Rows(torch.autograd.Function):
    """Each rank's part of a sum."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class TensorParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Rows.apply(self.down(self.up(Columns.apply(self.norm(x))).relu()))  # type: ignore[no-any-return, no-untyped-call]


@healthy
def tensor_parallel(rank: int) -> nn.Module:
    seeded(rank)
    model = TensorParallel()

    def share() -> None:
        for one in model.norm.parameters():
            dist.all_reduce(one.grad)

    return train(model, DataLoader(data(), batch_size=8), before=share)


@healthy
def uneven_inputs(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    rows = [(x, y) for x, y in sharded(rank)][: 5 + rank]
    with Join([model]):
        return train(model, rows, steps=9)


@healthy
def zero_redundancy(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    return train(model, sharded(rank), ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


@healthy
def same_validation_set(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    for _ in range(2):
        train(model, sharded(rank), steps=3)
        model.eval()
        with torch.no_grad():
            for x, _y in DataLoader(data(), batch_size=16):
                model(x)
        model.train()
    return model


@healthy
def constant_input(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net()), [(torch.ones(4, 4), torch.zeros(4, 1))] * 3)


@healthy
def one_batch_again_and_again(rank: int) -> nn.Module:
    seeded()
    return train(DDP(net()), [data()[:4]] * 4)


@healthy
def clipped_before_averaging(rank: int) -> nn.Module:
    seeded()
    model = net()

    def step() -> None:
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        average(model)

    return train(model, sharded(rank), before=step)


@healthy
def two_optimizers_and_two_models(rank: int) -> nn.Module:
    seeded()
    first, second = DDP(net()), DDP(net())
    train(first, sharded(rank))
    train(second, sharded(rank), torch.optim.Adam(second.parameters()))
    return nn.ModuleList([first, second])


@healthy
def rank_0_swaps_weights_after_training(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    train(model, sharded(rank))
    if rank == 0:
        model.module.load_state_dict({name: one * 0.9 for name, one in model.module.state_dict().items()})
    return model


@healthy
def a_head_for_each_rank(rank: int) -> nn.Module:
    seeded(rank)
    model = net()
    for one in model[0].parameters():
        dist.broadcast(one.data, 0)
    return train(model, sharded(rank), before=lambda: average(model, but=["2.weight", "2.bias"]))


@healthy
def a_head_for_each_rank_beside_ddp(rank: int) -> nn.Module:
    seeded(rank)
    head = nn.Linear(4, 1)
    seeded()
    return with_head(rank, head)


@healthy
def a_head_averaged_by_hand_beside_ddp(rank: int) -> nn.Module:
    seeded()
    return with_head(rank, nn.Linear(4, 1), is_averaged=True)


@healthy
def three_models_alike(rank: int) -> nn.Module:
    seeded()
    models = nn.ModuleList([DDP(net()) for _ in range(3)])
    for index in (1, 0, 2):
        train(models[index], sharded(rank), steps=2 + index)
    return models


@healthy
def sharded_by_fsdp(rank: int) -> nn.Module:
    seeded()
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return train(model, sharded(rank), torch.optim.Adam(model.parameters()))


@healthy
def generator_and_discriminator(rank: int) -> nn.Module:
    seeded()
    maker, judge = DDP(nn.Linear(2, 4)), DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    first, second = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for x, _ in sharded(rank):
        made = maker(torch.randn(4, 2))
        second.zero_grad()
        (judge(made.detach()) - judge(x)).mean().backward()
        second.step()
        first.zero_grad()
        for one in judge.parameters():
            one.requires_grad_(False)
        (-judge(made)).mean().backward()
        first.step()
        for one in judge.parameters():
            one.requires_grad_(True)
    return nn.ModuleList([maker, judge])


@healthy
def closures(rank: int) -> nn.Module:
    seeded()
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for x, y in list(sharded(rank))[:4]:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            average(model)
            dist.all_reduce(whole := loss.detach().clone())
            return whole / 2

        optimizer.step(closure)
    return model


@healthy
def compressed_gradients(rank: int) -> nn.Module:
    seeded()
    model = DDP(net(), gradient_as_bucket_view=True, find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, sharded(rank))


@healthy
def local_sgd_of_ddp(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=1, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return train(model, sharded(rank), optimizer)


@healthy
def compiled(rank: int) -> nn.Module:
    seeded()
    model = DDP(net())
    train(torch.compile(model, backend="eager"), sharded(rank), steps=3)  # type: ignore[arg-type]
    return model


@healthy
def ddp_that_cannot_be(rank: int) -> nn.Module:
    seeded()
    model = net().requires_grad_(False)
    with contextlib.suppress(RuntimeError):
        DDP(model)
    return model


# Drawn by generators that our own seed has made alike ---------------------------------------------------------------------------


def drawn_by_torch_unseeded(rank: int) -> nn.Module:
    return train(DDP(net()), DataLoader(data(), batch_size=4, shuffle=True))


def drawn_by_python(rank: int) -> nn.Module:
    seeded()
    rows = [random.choices(range(64), k=4) for _ in range(6)]
    return train(DDP(net()), (data()[one] for one in rows))


OWN_SEED = {"drawn_by_torch_unseeded": drawn_by_torch_unseeded, "drawn_by_python": drawn_by_python}
