"""Ranks that gather their reports; each writes what it got."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

import torchdebug_magics


def nan_on_one(rank: int) -> object:
    with torchdebug_magics.nanhunt(keep_going=True) as session:
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3):
            x = torch.tensor([-1.0 if rank == 1 and step == 2 else 1.0])
            (x.log() * weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.report


def other_shapes(rank: int) -> object:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with torchdebug_magics.shapes() as session:
        model(torch.rand(3 + (rank == 1), 4))
    return session.report


def main(kind: str, rank: int, world_size: int, store: str, out: str) -> None:
    distributed.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{store}")
    state = torch.get_rng_state()
    gathered = torchdebug_magics.gather({"nan": nan_on_one, "shapes": other_shapes}[kind](rank))
    assert kind == "shapes" or torch.equal(torch.get_rng_state(), state)
    distributed.all_reduce(torch.ones(1))  # the group is of use after it
    distributed.destroy_process_group()
    Path(f"{out}{rank}").write_text("none" if gathered is None else gathered.to_json())
