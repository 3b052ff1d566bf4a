"""Views that read dimensions in another order, and views that are as they are meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchdebug_magics


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
    "time in the batch": (lambda x: x.view(2 * 16, 3, 28, 30), (2, 3, 16, 28, 30), "x.transpose(1, 2).reshape(2 * 16, 3, 28, 30)"),
    "a view for a transpose": (lambda x: x.view(4, 48, 50), (4, 50, 48), "x.transpose(1, 2).reshape(4, 48, 50)"),
    "layers of a state in the features": (lambda x: torch.reshape(x, (7, -1)), (2, 7, 32), "torch.reshape(x.transpose(0, 1), (7, -1))"),
    "patches": (lambda x: x.reshape(2, 14 * 10, -1), (2, 3, 14, 10, 16, 16), "x.permute(0, 2, 3, 1, 4, 5).reshape(2, 14 * 10, -1)"),
    "pixels last": (lambda x: x.view(2, 12 * 10, 5), (2, 5, 12, 10), "x.permute(0, 2, 3, 1).reshape(2, 12 * 10, 5)"),
}


@pytest.mark.parametrize(("run", "sizes", "code"), MISREAD.values(), ids=MISREAD)
def test_a_view_that_moves_a_dimension_is_told_of(run: Any, sizes: tuple[int, ...], code: str) -> None:
    found = suspect(run, *sizes)
    assert found.op in {"view", "reshape"}
    assert "in the order of memory" in found.explanation
    x = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    assert eval(code, {"torch": torch, "x": x}).shape == run(x).shape
    assert found.fixes[0].code == code


MEANT = {
    "heads": (lambda x: x.view(4, 20, 8, 64).transpose(1, 2), (4, 20, 512)),
    "heads merged behind a transpose": (lambda x: x.transpose(1, 2).reshape(4, 20, 512), (4, 8, 20, 64)),
    "as many heads as steps": (lambda x: x.reshape(4, 8, 512), (4, 8, 8, 64)),
    "attention as torch writes it": (lambda x: x.contiguous().view(20, 64 * 8, 64).transpose(0, 1), (20, 64, 512)),
    "flattened": (lambda x: x.view(x.size(0), -1), (4, 8, 5, 5)),
    "frames": (lambda x: x.view(-1, 3, 8, 10), (2, 6, 3, 8, 10)),
    "windows": (lambda x: x.view(2, 2, 4, 3, 4, 6), (2, 8, 12, 6)),
    "windows back": (lambda x: x.view(2, 2, 3, 4, 4, 6), (12, 4, 4, 6)),
    "channels shuffled": (lambda x: x.view(2, 4, 3, 6, 6).transpose(1, 2).reshape(2, 12, 6, 6), (2, 12, 6, 6)),
    "a picture from features": (lambda x: x.view(-1, 128, 7, 7), (128, 1, 6272)),
    "a batch of one": (lambda x: x.view(8, 1, 6), (1, 8, 6)),
    "rows of a matrix": (lambda x: x.view(64, 10), (10, 64)),
    "a state of one layer": (lambda x: x.view(7, -1), (1, 7, 32)),
    "grid": (lambda x: x.view(2, 5, 3, 3, 8), (2, 45, 8)),
    "directions": (lambda x: x.view(9, 4, 2, 16), (9, 4, 32)),
}


@pytest.mark.parametrize(("run", "sizes"), MEANT.values(), ids=MEANT)
def test_a_view_that_splits_and_merges_is_left_alone(run: Any, sizes: tuple[int, ...]) -> None:
    assert suspect(run, *sizes) is None
