"""Fixes of a failed call are tried to the end of the step: what comes after it tells which of them was meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.unit.instruments.shapes.failed_cells import after_error
from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 4 * 4, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc(x)

net = Net()
opt = torch.optim.Adam(net.parameters())
data = [(torch.randn(2, 1, 8, 8), torch.randint(3, (2,))) for _ in range(3)]
def train():
    for x, y in data:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""


def test_what_is_changed_before_a_line_replaces_nothing_and_the_step_goes_on(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    report = after_error(shell, SETUP, "train()")
    assert report.fix_state == "verified"
    (source,) = fixed_source(report).values()
    assert "self.conv(x)), 2)\n        x = x.flatten(1)\n" in source
    with capture_output():
        assert shell.run_cell(f"{source}\ntrain()").success


def test_the_trial_changes_neither_weights_nor_code_nor_random_numbers(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        assert shell.run_cell(SETUP, store_history=True).success
        assert not shell.run_cell("train()", store_history=True).success
        net, opt = shell.user_ns["net"], shell.user_ns["opt"]
        before, code, random = [each.clone() for each in net.parameters()], type(net).forward.__code__, torch.get_rng_state()
        shell.run_cell("%torchdebug -o report", store_history=True)
    assert shell.user_ns["report"].fix_state == "verified"
    assert all(map(torch.equal, before, net.parameters()))
    assert all(each.grad is None for each in net.parameters())
    assert not opt.state
    assert type(net).forward.__code__ is code
    assert torch.equal(random, torch.get_rng_state())


def test_a_fix_after_which_the_step_fails_is_not_verified(shell: InteractiveShell) -> None:
    """The sizes are made to fit, and what comes after them cannot be computed whatever is done."""
    report = after_error(shell, SETUP, "x, y = data[0]\nout = net(x)\nassert out.dim() == 7")
    assert report.fix_state == "compiles"


def test_two_arguments_of_a_call_are_changed_together(shell: InteractiveShell) -> None:
    cell = "a, b = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)\nloss = judge(a, b)"
    judge = """\
class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.vgg = nn.Conv2d(3, 4, 3).requires_grad_(False)

    def forward(self, output, target):
        return F.mse_loss(self.vgg(output), self.vgg(target))
judge = Judge()
"""
    report = after_error(shell, SETUP + judge, cell)
    assert report.fix_state == "verified"
    (source,) = fixed_source(report).values()
    assert "judge(a.expand(-1, 3, -1, -1), b.expand(-1, 3, -1, -1))" in source
