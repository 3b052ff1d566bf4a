"""Views that read dimensions in another order, and views that are as they are meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchdebug_magics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Called(nn.Module):
    """A forward of one expression."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        """Give what the expression gives."""
        return self.run(x)


def suspect(run: Any, *sizes: int) -> Any:
    return torchdebug_magics.shapes(Called(run), torch.zeros(sizes)).suspect


MISREAD = {
    "heads merged": (lambda x: x.reshape(4, 20, 512), (4, 8, 20, 64), "x.transpose(1, 2).reshape(4, 20, 512)"),
    "heads split": (
        lambda x: x.view(4 * 8, -1, 64),
        (4, 20, 512),
        "x.view(x.size(0), x.size(1), 8, 64).transpose(1, 2).reshape(4 * 8, -1, 64)",
    ),
    "a view for a transpose": (lambda x: x.view(4, 48, 50), (4, 50, 48), "x.transpose(1, 2).reshape(4, 48, 50)"),
    "layers of a state in the features": (lambda x: torch.reshape(x, (7, -1)), (2, 7, 32), "torch.reshape(x.transpose(0, 1), (7, -1))"),
    "patches": (lambda x: x.reshape(2, 14 * 10, -1), (2, 3, 14, 10, 16, 16), "x.permute(0, 2, 3, 1, 4, 5).reshape(2, 14 * 10, -1)"),
    "pixels last": (lambda x: x.view(2, 12 * 10, 5), (2, 5, 12, 10), "x.permute(0, 2, 3, 1).reshape(2, 12 * 10, 5)"),
}


@pytest.mark.parametrize(("run", "sizes", "code"), MISREAD.values(), ids=MISREAD)
def test_a_view_that_moves_a_dimension_is_told_of(run: Any, sizes: tuple[int, ...], code: str) -> None:
    found = suspect(run, *sizes)
    assert found.op in {"view", "reshape"}
    assert "in memory order" in found.explanation
    x = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    assert eval(code, {"torch": torch, "x": x}).shape == run(x).shape
    assert found.fixes[0].code == code


MEANT = {
    "heads": (lambda x: x.view(4, 20, 8, 64).transpose(1, 2), (4, 20, 512)),
    "attention as torch writes it": (lambda x: x.contiguous().view(20, 64 * 8, 64).transpose(0, 1), (20, 64, 512)),
    "frames": (lambda x: x.view(-1, 3, 8, 10), (2, 6, 3, 8, 10)),
    "a picture from features": (lambda x: x.view(-1, 128, 7, 7), (128, 1, 6272)),
    "a batch of one": (lambda x: x.view(8, 1, 6), (1, 8, 6)),
    "grid": (lambda x: x.view(2, 5, 3, 3, 8), (2, 45, 8)),
    "directions": (lambda x: x.view(9, 4, 2, 16), (9, 4, 32)),
}


@pytest.mark.parametrize(("run", "sizes"), MEANT.values(), ids=MEANT)
def test_a_view_that_splits_and_merges_is_left_alone(run: Any, sizes: tuple[int, ...]) -> None:
    assert suspect(run, *sizes) is None


SETUP = """import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
net, other = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
x, y, actions, weight = torch.randn(16, 4), torch.randn(16), torch.randint(0, 1, (16, 1)), torch.rand(16)
class Mae(nn.Module):
    def forward(self, a, b):
        return (a - b).abs().mean()
def rmse(a, b):
    return torch.sqrt(torch.mean((b - a) ** 2))
"""
CROSSED = {
    "policy gradient": (
        "chance = torch.distributions.Normal(net(x), 1.0)\nloss = -(chance.log_prob(x[:, :1]) * y).mean()",
        "mul",
    ),
    "a smaller of two": ("ratio = net(x).exp()\nloss = -torch.min(ratio * y, ratio.clamp(0.8, 1.2) * y).mean()", "mul"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("cell", "op"), CROSSED.values(), ids=CROSSED)
def test_each_with_each_is_told_of_above_a_cell_that_does_not_fail(shell: InteractiveShell, cell: str, op: str) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert shell.run_cell(f"%%shapes -o found\n{cell}").success
    found = shell.user_ns["found"].suspect
    assert found is not None
    assert found.op == op
    assert "broadcasts" in found.explanation
    assert found.fixes


NOT_CROSSED = {
    "squared distances": (
        "a = other[0](x)\nd = (a ** 2).sum(1, keepdim=True) + (a ** 2).sum(1) - 2 * a @ a.T\n(d.clamp(min=0).sqrt() * 0.1).mean()"
    ),
}


@pytest.mark.parametrize("cell", NOT_CROSSED.values(), ids=NOT_CROSSED)
def test_what_is_meant_is_left_alone(shell: InteractiveShell, cell: str) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP)
        assert shell.run_cell(f"%%shapes -o found\n{cell}").success
    assert shell.user_ns["found"].suspect is None
    assert not [one for one in shell.user_ns["found"].problems if "broadcast" in one]
