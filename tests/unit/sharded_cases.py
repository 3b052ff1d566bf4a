"""One rank of a gloo job: every instrument on models that FSDP2, tensor parallelism and `distribute_tensor` have sharded.

A program for ``tests.rank_job``; what each case returned is written to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import hashlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchdebug_magics
from torchdebug_magics.probing.distributed.this_rank import collectives_count
from torchdebug_magics.probing.storages import local_of, sharding_of

MOST_S = 180
"""After which a rank that waits for ever says where, before the launch ends it."""
KINDS = ("fsdp", "tensor parallel", "dtensors")
WATCHED = [
    *itertools.product(("nanhunt", "shapes", "autograd", "gradwatch"), KINDS),
    *itertools.product(("memtrace", "memgauge", "deterministic", "hangwatch"), KINDS[:2]),
]
"""(instrument, kind of model)."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks, self.head = nn.Embedding(48, 32), nn.ModuleList([Block(32), Block(32)]), nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Training:
    """Three steps of one sharded model, from the same start each time that it is made."""

    def __init__(self, kind: str, rank: int, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model: nn.Module = Transformer() if kind == "fsdp" else Perceptron()
        if kind == "fsdp":
            for block in self.model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            torch.manual_seed(rank)
            self.batches = [torch.randint(48, (4, 8)) for _ in range(3)]
        else:
            self.batches = [torch.randn(8, 32) for _ in range(3)]
        if kind == "tensor parallel":
            parallelize_module(self.model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif kind == "dtensors":
            for layer in self.model.children():
                for name, one in list(layer.named_parameters()):
                    setattr(layer, name, nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])))
            self.batches = [distribute_tensor(one, mesh, [Replicate()]) for one in self.batches]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        output = self.model(batch)
        return nn.functional.cross_entropy(output.flatten(0, 1), batch.flip(1).flatten()) if self.kind == "fsdp" else (output**2).mean()

    def run(self) -> None:
        for batch in self.batches:
            self.loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> str:
        """A digest of the shards here, of what the optimizer keeps of them, and of the generator."""
        kept = [one for entry in self.optimizer.state.values() for one in entry.values()]
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in (*self.model.parameters(), *kept)]
        digest = hashlib.sha1(torch.get_rng_state().numpy().tobytes())
        for part in parts:
            digest.update(part.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def watched(instrument: str, training: Training) -> Any:
    with getattr(torchdebug_magics, instrument)() as session:
        training.run()
    return session.report


def told(report: Any) -> dict[str, Any]:
    return {"verdict": report.verdict, "problems": list(report.problems), "report": report.to_dict()}


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- cases: rank, mesh -> facts -----------------------------------------------------------------------------------------------------


def plain(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    training, before = Training(kind, rank, mesh), collectives_count()
    training.run()
    return {"state": training.state(), "collectives": collectives_count() - before}


def under(instrument: str, kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    training, before = Training(kind, rank, mesh), collectives_count()
    report = watched(instrument, training)
    return {"collectives": collectives_count() - before, "state": training.state(), **told(report)}


def alone(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What looks at once, on one rank while the other trains: nothing of it may wait for the other, or leave a trace."""
    training, before = Training(kind, rank, mesh), collectives_count()
    facts: dict[str, Any] = {}
    if rank == 0:
        facts["shapes"] = told(torchdebug_magics.shapes(training.model, training.batches[0]))
        facts["stepzero"] = told(torchdebug_magics.stepzero(training.model, training.optimizer, training.batches[0]))
        facts["shrink"] = told(torchdebug_magics.shrink(training.model, training.batches[0]))
        facts["overfit"] = error_of(lambda: torchdebug_magics.overfit(training.model, (training.batches[0],) * 2, nn.MSELoss()))
        facts["memmark"] = error_of(lambda: torchdebug_magics.memmark("here"))
    training.run()
    if rank == 0:
        facts["moved"] = told(torchdebug_magics.stepzero())
    return {**facts, "collectives": collectives_count() - before, "state": training.state()}


def restored(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    training = Training(kind, rank, mesh)
    torchdebug_magics.stepzero(training.model, training.optimizer)
    training.run()
    first = training.state()
    torchdebug_magics.stepzero(restore=True)
    training.run()
    file = error_of(lambda: torchdebug_magics.stepzero(training.model, file=f"zero{rank}.pt"))
    return {"first": first, "second": training.state(), "file": file, "is_written": Path(f"zero{rank}.pt").exists()}


def verified(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    training = Training(kind, rank, mesh)
    return {**told(torchdebug_magics.verify(training.run)), "state": training.state()}


def compared(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Three runs: the second as the first, the third with another weight on rank 1."""
    found = []
    for run in range(3):
        training, options = Training(kind, rank, mesh), {"against": f"print{rank}.json"} if run else {"save": f"print{rank}.json"}
        if run == 2 and rank == 1:
            with torch.no_grad():
                local_of(next(training.model.parameters())).view(-1)[0] += 1
        with torchdebug_magics.deterministic(**options) as session:
            training.run()
        found.append(session.report.verdict)
    return {"same": found[1], "changed": found[2]}


def overfitted(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    training, session = Training(kind, rank, mesh), torchdebug_magics.overfit()
    training.batches = torch.utils.data.DataLoader(torch.randint(48, (16, 8)), batch_size=4)  # type: ignore[assignment]
    before = training.state(), collectives_count()

    def body() -> None:
        with session:
            training.run()

    return {"error": error_of(body), "is_same": before == (training.state(), collectives_count())}


def one_shard_of_zeros(_kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Rank 1 holds the second half of a table of which only the first is read: its gradient is zero there, and nothing is wrong."""
    model = nn.Embedding(32, 8)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchdebug_magics.gradwatch() as session:
        for _ in range(20):
            (model(torch.arange(16)) - 1).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return told(session.report)


def reached(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """``%autograd loss`` on one rank."""
    training = Training(kind, rank, mesh)
    loss = training.loss(training.batches[0])
    loss.backward(retain_graph=True)
    before = collectives_count()
    report = torchdebug_magics.autograd(loss) if rank == 0 else None
    return {"collectives": collectives_count() - before, **({} if report is None else told(report))}


def faulty(kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Faults that are found in a model that is not sharded."""
    without_zeroing = Training(kind, rank, mesh)
    without_zeroing.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    one_missing = Training(kind, rank, mesh)
    one_missing.optimizer = torch.optim.AdamW(list(one_missing.model.parameters())[:-1])
    too_early = Training(kind, rank, mesh)
    too_early.optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(one.shape)) for one in too_early.model.parameters()])
    trainings = {"without_zeroing": without_zeroing, "one_missing": one_missing, "too_early": too_early}
    return {name: watched("autograd", training).verdict for name, training in trainings.items()}


def needs_data(_kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What cannot be run without data is not run for real on one rank alone."""

    class Chooses(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else x

    model = parallelize_module(Chooses(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    before = collectives_count()
    error = error_of(lambda: torchdebug_magics.shapes(model, torch.randn(8, 32))) if rank == 0 else ""
    return {"error": error, "collectives": collectives_count() - before}


def wrapped(_kind: str, rank: int, _mesh: DeviceMesh) -> dict[str, Any]:
    """Wrappers whose forward communicates, even without data."""

    class Normed(nn.Sequential):
        """With buffers, which DistributedDataParallel sends around."""

    plain = nn.parallel.DistributedDataParallel(Normed(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    flat = FullyShardedDataParallel(Perceptron(), device_id=torch.device("cpu"))
    before = collectives_count()
    shapes = torchdebug_magics.shapes(plain, torch.randn(2, 4)).verdict if rank == 0 else ""
    refused = error_of(lambda: torchdebug_magics.shapes(flat, torch.randn(2, 32))) if rank == 0 else ""
    return {"shapes": shapes, "refused": refused, "collectives": collectives_count() - before}


def held_memory(_kind: str, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What an error holds of a DTensor is counted as it is here."""

    def fail() -> None:
        weight = distribute_tensor(torch.zeros(1 << 10, 1 << 10), mesh, [Shard(0)])
        raise RuntimeError(str(weight.shape))

    try:
        fail()
    except RuntimeError as error:
        sys.last_exc = sys.last_value = error  # type: ignore[attr-defined]
        sys.last_type, sys.last_traceback = type(error), error.__traceback__
    report = torchdebug_magics.memclean()
    del sys.last_value, sys.last_type, sys.last_traceback, sys.last_exc  # type: ignore[attr-defined]
    return told(report)


def asked(_kind: str, _rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    whole = torch.arange(12.0).reshape(6, 2)
    tensors = {"shard": [Shard(0)], "replicate": [Replicate()], "columns": [Shard(1)]}
    return {name: repr(sharding_of(distribute_tensor(whole, mesh, how))) for name, how in tensors.items()}


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {"asked": (asked, "")}
    for kind in KINDS:
        found[f"plain {kind}"] = plain, kind
    for kind, case in itertools.product(KINDS, (alone, restored, verified, compared, reached, faulty)):
        found[f"{case.__name__} {kind}"] = case, kind
    for case in (one_shard_of_zeros, needs_data, held_memory):
        found[case.__name__] = case, ""
    found["overfitted fsdp"] = overfitted, "fsdp"
    for instrument, kind in WATCHED:
        found[f"{instrument} {kind}"] = lambda *args, instrument=instrument: under(instrument, *args), kind
    found["wrapped"] = wrapped, ""  # last: its models outlive it
    return found


def main(rank: int, size: int, folder: Path) -> None:
    """Run every case on this rank, in the job's folder."""
    faulthandler.dump_traceback_later(MOST_S)
    os.chdir(folder)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=dt.timedelta(seconds=30))
    mesh, facts = init_device_mesh("cpu", (size,)), {}
    for name, (case, kind) in cases().items():
        if size > 1 or (case in {plain, verified} and kind != "dtensors"):
            try:
                facts[name] = case(kind, rank, mesh)
            except Exception:
                facts[name] = {"raised": traceback.format_exc()}
        (folder / f"{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()
