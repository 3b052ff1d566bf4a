"""A live model becomes small by a line, and large again by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

MODEL = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.inner(self.norm(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
class Indexed(Model):
    def forward(self, x):
        return self.blocks[7](super().forward(x))
model, x = Model(), torch.randn(2, 8)
"""


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """A kernel with a model."""
    ran = kernel.run(MODEL)
    assert ran.status == "ok", ran.traceback
    return kernel


@pytest.mark.parametrize("line", ["model", "model x", "model(x)", "model (2, 8)", "model x --layers 2"])
def test_a_line_makes_it_small_and_another_one_large(line: str, ready: Kernel) -> None:
    ran = ready.run(f"%shrink {line} -o s")
    assert ran.status == "ok", ran.traceback
    assert "parameters became 176 · `blocks` keeps layers 0 and 1 of 12" in " ".join(ran.text.split())
    assert ready.value("(dict(s.kept), len(model.blocks))") == "({'blocks': (0, 1)}, 2)"
    again = ready.run("%shrink model --undo -o u")
    assert "Restored" in again.text
    assert ready.value("(len(model.blocks), u.undone)") == "(12, True)"


@on_both_stacks
def test_the_reason_and_the_line_in_the_cell_are_shown(ready: Kernel) -> None:
    ran = ready.run("%shrink Indexed() x -o s")
    assert ran.status == "ok", ran.traceback
    assert "Not shrunk: the model is unchanged why its forward fails with 2 layers" in " ".join(ran.text.split())
    assert (ready.value("s.location") or "").endswith("line 19'")


def test_wrong_use_is_one_line(ready: Kernel) -> None:
    for line, says in {"%shrink 3": "torch.nn.Module", "%shrink model --undo": "nothing to undo", "%%shrink\nx": "watches no cell"}.items():
        ran = ready.run(line)
        assert (ran.ename, says in ran.evalue) == ("UsageError", True), ran
