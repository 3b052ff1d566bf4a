"""`%%gradwatch` as a person meets it: planted faults in a kernel; a session over several cells; files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernel.kernels import on_stacks
from tests.unit.instruments.gradwatch.healthy_trainings import HEALTHY
from tests.unit.instruments.gradwatch.planted_faults import FAULTS

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

# All of them run through the function and the magic in a shell of the same process (tests/unit): here a few.
_FAULTS = {fault.name: fault for fault in FAULTS}
_HEALTHY = {training.name: training for training in HEALTHY}
_SETUP = """\
import torch
from torch import nn
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(8, 4)
"""
_STEP = "optimizer.zero_grad()\nnet(x).square().mean().backward()\noptimizer.step()"


def _report(kernel: Kernel) -> dict[str, Any]:
    ran = kernel.run("print(g.to_json(indent=None))")
    assert ran.status == "ok", ran.traceback
    read: dict[str, Any] = json.loads(ran.stdout)
    return read


@pytest.mark.parametrize(("stack", "name"), on_stacks(list(_FAULTS)[1::20], colab=list(_FAULTS)[7::20]), indirect=["stack"])
def test_the_fault_is_named(kernel: Kernel, name: str) -> None:
    fault = _FAULTS[name]
    ran = kernel.run(f"%%gradwatch -o g\n{fault.body}", timeout_s=120)
    assert ran.status == "ok", ran.traceback
    found = _report(kernel)["finding"]
    assert (found["kind"], found["module"] in fault.modules) == (fault.kind, True)
    assert fault.steps[0] <= found["step"] <= fault.steps[1]
    assert found["location"]["cell"] == ran.count
    assert fault.fix in found["fix"]


@pytest.mark.parametrize(("stack", "name"), on_stacks(list(_HEALTHY)[:1], colab=list(_HEALTHY)[11:12]), indirect=["stack"])
def test_nothing_is_found(kernel: Kernel, name: str) -> None:
    ran = kernel.run(f"%%gradwatch -o g\n{_HEALTHY[name].body}", timeout_s=120)
    assert ran.status == "ok", ran.traceback
    assert _report(kernel)["findings"] == []


def test_a_session_goes_on_over_several_cells(kernel: Kernel) -> None:
    kernel.run(_SETUP)
    assert kernel.run("%gradwatch on").status == "ok"
    for _ in range(3):
        assert kernel.run(_STEP).status == "ok"
    ran = kernel.run("%gradwatch off")
    assert ran.status == "ok", ran.traceback
    assert "3 steps of 1 module" in str(ran.outputs)


def test_wrong_options_are_one_line_and_nothing_runs(kernel: Kernel) -> None:
    ran = kernel.run("%%gradwatch --csv no/such/folder/steps.csv\nwas_run = True")
    assert ran.ename == "UsageError"
    assert kernel.value("'was_run' in globals()") == "False"
