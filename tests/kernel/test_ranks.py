"""Ranks that a cell launches, as people launch them from a notebook: one report, above which nothing of the ranks' own is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import processes
from tests.kernel.kernels import on_both_stacks, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kernel.kernels import Kernel

TRAIN = """\
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch._dynamo

def train(rank=None, world=2, store=None, bad=1):
    if store is not None:
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.rand(8, 4) + 1
        if rank == bad and step == 2:
            x[2] = -1
        loss = (x.log() * model(x)).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
    dist.destroy_process_group()
"""
LINE = 19
"""Of the logarithm."""
LEFT = "import glob, tempfile; print(glob.glob(os.path.join(tempfile.gettempdir(), 'tdm*')))"


@pytest.fixture
def trains(kernel: Kernel, tmp_path: Path) -> Kernel:
    """A kernel in which `train` is defined, whose temporary files lie in a folder of its own."""
    assert kernel.run(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; store = {str(tmp_path / 'store')!r}").status == "ok"
    assert kernel.run(TRAIN).status == "ok"
    return kernel


def report(kernel: Kernel, name: str = "r") -> dict[str, Any]:
    ran = kernel.run(f"print({name}.to_json(indent=None))")
    assert ran.status == "ok", ran.traceback
    read: dict[str, Any] = json.loads(ran.stdout)
    return read


@on_both_stacks
def test_ranks_that_are_forked(trains: Kernel) -> None:
    ran = trains.run("%%nanhunt -o r\nmp.start_processes(train, (2, store), nprocs=2, start_method='fork')", timeout_s=120)
    assert (ran.status, ran.ename) == ("error", "ProcessRaisedException")
    assert len([one for one in ran.displays if one.get("text/plain")]) == 1, "one report, and no rank's own"
    shown = next(one for one in ran.displays if one.get("text/plain"))
    assert "Rank 1 of 2: NaN from log in forward · step 2" in shown["text/plain"]
    assert "<table" in shown["text/html"]
    found = report(trains)
    assert (found["first"], found["finding"]["op"], found["finding"]["location"]["line"]) == (1, "log", LINE)
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert trains.run(LEFT).stdout.strip() == "[]"


def test_healthy_ranks(trains: Kernel) -> None:
    cell = "%%memtrace -o m\n%%nanhunt -o r\nmp.start_processes(train, (2, store, None), nprocs=2, start_method='fork')"
    ran = trains.run(cell, timeout_s=120)
    assert ran.status == "ok", ran.traceback
    assert ran.stderr == ""
    for name in ("m", "r"):
        assert [one["state"] for one in report(trains, name)["ranks"]] == ["finished", "finished"]
        assert report(trains, name)["first"] is None


def test_a_function_of_the_notebook_under_spawn(trains: Kernel) -> None:
    ran = trains.run("%%nanhunt -o r\nmp.spawn(train, (2, store), nprocs=2)", timeout_s=120)
    assert ran.status == "error"
    assert "start_method='fork'" in report(trains)["verdict"]
    assert "`train`" in report(trains)["verdict"]


@pytest.fixture
def launching(start_kernel: Callable[[str], Kernel], tmp_path: Path) -> Kernel:
    """A kernel of its own, as Lightning puts functions in place of torch's for good; of the stack where the launchers are installed."""
    kernel = start_kernel("modern")
    kernel.run("%load_ext torchdebug_magics\nimport tempfile")
    assert kernel.run(f"tempfile.tempdir = {str(tmp_path)!r}; store = {str(tmp_path / 'store')!r}").status == "ok"
    assert kernel.run(TRAIN).status == "ok"
    return kernel


def test_the_launchers_of_accelerate_and_lightning(launching: Kernel) -> None:
    assert launching.run(PORT).status == "ok"
    cell = "%%nanhunt -o r\nfrom accelerate import notebook_launcher\nnotebook_launcher(train, num_processes=2, use_port=port)"
    ran = launching.run(cell, timeout_s=200)
    assert (ran.status, ran.ename) == ("error", "ChildFailedError")
    found = report(launching)
    assert (found["first"], found["finding"]["op"], found["finding"]["location"]["line"]) == (1, "log", LINE)

    assert launching.run(LIGHTNING).status == "ok"
    ran = launching.run(FIT, timeout_s=200)
    found = report(launching)
    assert (found["first"], found["finding"]["op"]) == (1, "log"), (found["verdict"], ran.traceback)
    assert launching.run(LEFT).stdout.strip() == "[]"


PX_SETUP = """\
import ipyparallel, tempfile, os
cluster = ipyparallel.Cluster(n=2, log_level=50)
client = cluster.start_and_connect_sync(activate=True)
store = os.path.join(tempfile.mkdtemp(), "store")
for number in client.ids:
    client[number].push({"rank": number, "store": store}, block=True)
"""
PX_JOB = """\
%%px
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
"""
PX_TRAIN = """\
%%px
%%nanhunt -o r
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
for step in range(3):
    x = torch.rand(8, 4) + 1
    if rank == BAD and step == 1:
        x[2] = -1
    (x.log() * model(x)).mean().backward()
    if rank != BAD:
        dist.get_rank()
"""


def test_engines_of_ipyparallel(start_kernel: Callable[[str], Kernel]) -> None:
    """One report for all engines of a job, in the client, which has loaded nothing itself."""
    kernel = start_kernel("modern")
    assert kernel.run(PX_SETUP, timeout_s=120).status == "ok"
    assert kernel.run("%px %load_ext torchdebug_magics", timeout_s=60).status == "ok"
    assert kernel.run(PX_JOB, timeout_s=60).status == "ok"
    ran = kernel.run(PX_TRAIN.replace("BAD", "None"), timeout_s=120)
    assert ran.status == "ok", ran.traceback
    assert ran.text.count("No NaN or inf in 3 backward passes") == 3, ran.text
    assert ran.text.count("All 2 ranks:") == 1
    ran = kernel.run(PX_TRAIN.replace("BAD", "1"), timeout_s=120)
    assert ran.text.count("Rank 1 of 2: NaN from log in forward · step 0") == 1
    first = kernel.run("print(client[0].apply_sync(lambda: (r.first, r.finding.op, len(r.ranks))))")
    assert first.stdout.strip() == "(1, 'log', 2)"
    kernel.run("cluster.stop_cluster_sync()", timeout_s=60)
    wait_until(
        lambda: not any("ipyparallel" in command for command in map(processes.command, processes.running_children())),
        20,
        "the engines run on",
    )


PORT = """\
import socket
with socket.socket() as free:
    free.bind(("", 0))
    port = str(free.getsockname()[1])
"""
"""The launcher's own is taken where another test of this machine launches ranks."""
LIGHTNING = """\
import lightning, logging, warnings
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        x = batch[0] + 1
        if self.global_rank == 1 and index == 2:
            x[0] = -1
        return (x.log() * self.net(x)).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(64, 4)), batch_size=8)
"""
FIT = """\
%%nanhunt -o r
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_notebook", logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(), data)
"""
