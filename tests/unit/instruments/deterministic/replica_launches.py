"""Launches ranks under ``deterministic()``, as a user's file does, and writes each report: a program for ``tests.rank_job``."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

import torchdebug_magics
from tests.unit.instruments.deterministic.replica_cases import data, net, sharded, train
from torchdebug_magics import catalog
from torchdebug_magics.instrument import SCRIPT


def train_rank(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if kind != "unseeded":
        torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(net())
    loader: Any = DataLoader(data(), batch_size=4, shuffle=True) if kind == "unseeded" else sharded(rank)
    train(model, loader, torch.optim.SGD(model.parameters(), lr=0.1))
    del model  # else destroying the group may wait for ever
    dist.destroy_process_group()


def without_torch(_rank: int) -> None:
    """A helper, that is no rank of anything."""


def launch(kind: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as store:
        mp.start_processes(train_rank, args=(store, kind), nprocs=2, start_method="fork")


def reported(run: Callable[[], object], **options: object) -> Any:
    instrument = catalog.instrument("deterministic")
    with instrument.session_of_cell(options, SCRIPT) as session:
        run()
    return session.report


def main(_rank: int, _size: int, folder: Path) -> None:
    """Write ``FOLDER/reports.pickle``: the report of each launch, by what was launched."""
    torch.set_num_threads(1)
    reports: dict[str, Any] = {"unseeded": reported(lambda: launch("unseeded", folder))}
    reports["saved"] = reported(lambda: launch("good", folder), save=f"{folder}/run.json", ranks=True)
    reports["helper"] = reported(lambda: mp.start_processes(without_torch, nprocs=1, start_method="fork"))
    with torchdebug_magics.deterministic() as alone:
        train(net(), DataLoader(data(), batch_size=4))
    reports["alone"] = alone.report
    (folder / "reports.pickle").write_bytes(pickle.dumps(reports))
