"""Losses that are networks: their own weights stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """import torch
from torch import nn
import torch.nn.functional as F
class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        self.vgg = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)).eval()
        self.vgg.requires_grad_(False)
    def forward(self, output, target):
        a = self.vgg(output)
        return F.mse_loss(a, self.vgg(target))
class LearnedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    def forward(self, output, target):
        return (self.net(output) - self.net(target)).abs().mean()
class Net(nn.Module):
    def __init__(self, out=3, more=1):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=more)
        self.out = nn.Conv2d(8, out, 3, padding=1)
    def forward(self, x):
        return self.out(F.relu(self.up(F.relu(self.down(x)))))
x, gray, last = torch.rand(2, 3, 32, 32), torch.rand(2, 1, 32, 32), torch.rand(2, 32, 32, 3)
"""
CASES = {
    "a smaller output": ("Perceptual()", "Net(3, 0)", "x", "mse_loss"),
    "fewer channels": ("Perceptual()", "Net(1)", "x", "conv2d"),
    "fewer channels, for a loss that is trained": ("LearnedLoss()", "Net(1)", "x", "conv2d"),
    "gray on both sides": ("Perceptual()", "Net(1)", "gray", "conv2d"),
    "channels last": ("Perceptual()", "Net()", "last", "conv2d"),
}


@pytest.mark.parametrize(("judge", "net", "target", "op"), CASES.values(), ids=CASES)
def test_it_is_explained_at_the_part_that_refuses(shell: InteractiveShell, judge: str, net: str, target: str, op: str) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell(f"judge, net = {judge}, {net}")
        assert not shell.run_cell(f"pred = net(x)\nloss = F.mse_loss(pred, pred) + 0.1 * judge(pred, {target})").success
        shell.run_cell("%shapes -o post")
    failure = shell.user_ns["post"].failure
    assert failure.op == op
    assert failure.fixes or op == "mse_loss"
    assert all(fix.verified for fix in failure.fixes)
    assert not any("nn.Conv2d" in fix.code for fix in failure.fixes[:1])  # whoever froze weights does not want new ones


def test_weights_that_are_not_trained_are_the_last_to_be_made_anew(shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        shell.run_cell("vgg = Perceptual().vgg\ndef far(a, b):\n    return F.mse_loss(vgg(a), vgg(b))")
        assert not shell.run_cell("far(gray, x)").success
        shell.run_cell("%shapes -o post")
    assert shell.user_ns["post"].failure.fixes[0].code == "vgg(a.expand(-1, 3, -1, -1))"
