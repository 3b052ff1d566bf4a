"""Runs every case on this rank of two, each in a session of its own, and writes what was found: a program for ``tests.rank_job``."""

from __future__ import annotations

import datetime as dt
import pickle
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.unit.instruments.deterministic import replica_cases as cases
from torchdebug_magics.instruments.deterministic.probe import DeterministicProbe
from torchdebug_magics.instruments.deterministic.report import compared
from torchdebug_magics.probing import hooks, wrappers
from torchdebug_magics.ranks.rank_traces import record_of
from torchdebug_magics.session import Session


def digest(model: torch.nn.Module) -> list[list[float]]:
    return [getattr(one, "to_local", lambda one=one: one)().flatten().tolist() for one in model.state_dict().values()]


def run(name: str, case: Any, rank: int) -> tuple[Any, list[list[float]]]:
    session: Session[Any] = Session(DeterministicProbe(seed=42, in_rank=True, ranks="every" in name))
    with session:
        trained = digest(case(rank))
    return record_of(compared(session.report), rank, session.report, None, 0.0), trained


def _begin_anew() -> None:
    """As each process begins."""
    torch.seed()
    random.seed()
    np.random.set_state(np.random.RandomState().get_state())  # noqa: NPY002
    np.random.mtrand._rand = np.random.RandomState()  # type: ignore[attr-defined]


def _left_behind() -> list[str]:
    places = [f"{holder.__name__}.{name}" for holder, name in wrappers._places() if hasattr(getattr(holder, name), wrappers.MARK)]
    tables = [name for owner, name in hooks._TABLES if any(hasattr(one, wrappers.MARK) for one in getattr(owner, name, {}).values())]
    return places + tables


def main(rank: int, size: int, folder: Path) -> None:
    """Write ``FOLDER/RANK.pickle``: (record, what was trained in a plain run, and under the instrument) by case."""
    limit = dt.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    begin_s = time.perf_counter()
    everything = {**{name: case for name, (case, _) in cases.PLANTED.items()}, **cases.HEALTHY, **cases.OWN_SEED}
    for name, case in everything.items():
        print(name, round(time.perf_counter() - begin_s, 1), flush=True)
        _begin_anew()
        plain = digest(case(rank)) if name in cases.HEALTHY else None
        record, trained = run(name, case, rank)
        found[name] = record, plain, trained
    found["left behind"] = _left_behind()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
