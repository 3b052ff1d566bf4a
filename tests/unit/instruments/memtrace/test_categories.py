"""What a byte is to a model, and who asked for it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.doors import MagicDoor

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 10))
opt = torch.optim.Adam(net.parameters())
x, y = torch.randn(32, 64), torch.randint(10, (32,))
"""
WEIGHTS = 64 * 128 + 128 + 2 * 128 + 128 * 10 + 10
STEP = "loss = F.cross_entropy(net(x), y)\nloss.backward()\nopt.step()\n"


def trace(shell: InteractiveShell, code: str) -> Any:
    shell.run_cell(SETUP)
    seen = MagicDoor(shell)("memtrace", code)
    assert seen.error is None
    assert seen.report.problems == ()
    return seen.report


def live(report: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for site in report.sites:
        if site.live_bytes:
            found[site.category] += site.live_bytes
    return found


def test_a_step_of_training(shell: InteractiveShell) -> None:
    found = live(trace(shell, STEP))
    steps = 6 * 4
    assert (found["gradient"], found["optimizer state"]) == (WEIGHTS * 4, 2 * WEIGHTS * 4 + steps)
    assert set(found) <= {"gradient", "optimizer state", "activation"}  # the loss alone


def test_what_is_old_has_its_category_at_the_peak(shell: InteractiveShell) -> None:
    peak = trace(shell, f"opt.zero_grad()\n{STEP}").peak.by_category
    assert peak["parameter"] == WEIGHTS * 4
    assert peak["buffer"] == 2 * 128 * 4 + 8


def test_at_the_peak_of_the_forward_there_are_activations(shell: InteractiveShell) -> None:
    report = trace(shell, "out = net(torch.randn(4096, 64))")
    assert report.peak.phase == "forward"
    assert max(report.peak.by_category, key=report.peak.by_category.get) == "activation"
    assert {"0", "2"} <= set(report.peak.by_module)


@pytest.mark.parametrize("guard", ["torch.no_grad()", "torch.inference_mode()"])
def test_without_gradients_there_are_none(shell: InteractiveShell, guard: str) -> None:
    report = trace(shell, f"net.eval()\nwith {guard}:\n    out = net(x)\n")
    assert live(report) == {"other": 32 * 10 * 4}
    assert {site.category for site in report.sites} <= {"other", "temporary"}


def test_frozen_weights_have_no_gradients(shell: InteractiveShell) -> None:
    report = trace(shell, f"for one in net[:3].parameters():\n    one.requires_grad_(False)\n{STEP}")
    assert live(report)["gradient"] == (128 * 10 + 10) * 4
    assert report.peak.by_category["parameter"] == WEIGHTS * 4


def test_a_moving_average(shell: InteractiveShell) -> None:
    report = trace(shell, "average = torch.optim.swa_utils.AveragedModel(net)\naverage.update_parameters(net)\n")
    assert live(report)["parameter"] == WEIGHTS * 4


def test_accumulated_gradients(shell: InteractiveShell) -> None:
    found = live(trace(shell, "for _ in range(4):\n    F.cross_entropy(net(x), y).backward()\n"))
    assert found == {"gradient": WEIGHTS * 4}


def test_tensors_without_a_module(shell: InteractiveShell) -> None:
    code = """w = torch.randn(64, 10, requires_grad=True)
hidden = x @ w
loss = F.cross_entropy(hidden, y)
loss.backward()
"""
    found = live(trace(shell, code))
    assert (found["parameter"], found["gradient"]) == (64 * 10 * 4, 64 * 10 * 4)


def test_a_new_buffer(shell: InteractiveShell) -> None:
    assert live(trace(shell, "net.register_buffer('mask', torch.ones(50))"))["buffer"] == 200


def test_bytes_of_the_backward_are_at_the_line_and_the_module_of_the_forward(shell: InteractiveShell) -> None:
    code = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
    def forward(self, a):
        a = self.first(a)
        return self.second(a.relu())
model = Net()
model(x).sum().backward()
"""
    report = trace(shell, code)
    gradients = {(site.location.line, site.module): site.live_bytes for site in report.sites if site.category == "gradient"}
    assert gradients == {(7, "first"): (64 * 32 + 32) * 4, (8, "second"): (32 * 10 + 10) * 4}
    assert {site.phase for site in report.sites if site.category == "gradient"} == {"backward"}


def test_bytes_of_a_backward_that_the_user_wrote_are_at_its_own_line(shell: InteractiveShell) -> None:
    code = """class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2
    @staticmethod
    def backward(ctx, slope):
        return slope.repeat(1, 1) * 2
a = torch.ones(100, 100, requires_grad=True)
Twice.apply(a).sum().backward()
"""
    report = trace(shell, code)
    assert [site.location.line for site in report.sites if site.category == "gradient"] == [8]


def test_checkpointing_lowers_the_peak(shell: InteractiveShell) -> None:
    code = """from torch.utils.checkpoint import checkpoint
blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6))
def run(a):
    for block in blocks:
        a = {call}
    return a
run(torch.randn(2048, 64)).sum().backward()
"""
    plain = trace(shell, code.format(call="block(a)"))
    less = trace(shell, code.format(call="checkpoint(block, a, use_reentrant=False)"))
    assert less.peak_bytes - less.start_bytes < 0.6 * (plain.peak_bytes - plain.start_bytes)


def test_phases(shell: InteractiveShell) -> None:
    report = trace(shell, f"opt.zero_grad()\n{STEP}")
    phases = {site.phase for site in report.sites}
    assert {"forward", "loss", "backward", "optimizer"} <= phases
