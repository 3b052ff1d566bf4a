"""In a real kernel, on both stacks: step zero is kept by a line, compared with by another, and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

MODEL = """
import torch
from torch import nn
model, x = nn.Linear(4, 2), torch.ones(3, 4)
optimizer = torch.optim.Adam(model.parameters())
"""
TRAIN = """
for _ in range(5):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
"""


@on_both_stacks
def test_kept_compared_restored_and_dropped(kernel: Kernel) -> None:
    lines = (
        "import torch\nfrom torch import nn\nmodel, x = nn.Linear(4, 2), torch.ones(3, 4)\noptimizer = torch.optim.Adam(model.parameters())"
    )
    assert kernel.run(lines).status == "ok"
    assert "Step zero is kept: 2 parameters, buffers, optimizer and random state" in kernel.run("%stepzero model optimizer x").text
    assert kernel.run(TRAIN).status == "ok"
    assert "After 5 steps 2 of 2 parameters moved" in kernel.run("%stepzero -o z").text
    assert kernel.value("(sorted(row.parameter for row in z.moved), z.unmoved, z.data[0].data)") == "(['bias', 'weight'], (), 'x')"
    assert "Restored to step zero" in kernel.run("%stepzero --restore").text
    assert "no parameter has moved" in kernel.run("%stepzero").text
    assert "dropped" in kernel.run("%stepzero --drop").text
    ran = kernel.run("%stepzero")
    assert (ran.ename, "no step zero was kept" in ran.evalue) == ("UsageError", True)
