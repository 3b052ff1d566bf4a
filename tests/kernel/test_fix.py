"""``%torchdebug fix``: the cell of the last report, repaired, as the next cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kernel.kernels import on_both_stacks

if TYPE_CHECKING:
    from tests.kernel.kernels import Kernel

pytestmark = on_both_stacks

CELL = """%%nanhunt
import torch
weight = torch.zeros(3, requires_grad=True)
loss = torch.sqrt(weight.sum())  # of nothing
loss.backward()"""
REPAIRED = CELL.replace("weight.sum()", "weight.sum().clamp(min=1e-12)")


def next_cells(ran: object) -> list[str]:
    payload = ran.payload  # type: ignore[attr-defined]
    return [part["text"] for part in payload if part["source"] == "set_next_input" and not part["replace"]]


def test_the_repaired_cell_comes_below_and_runs(kernel: Kernel) -> None:
    failed = kernel.run(CELL)
    assert failed.ename == "NonFiniteError"
    fixed = kernel.run("%torchdebug fix")
    assert next_cells(fixed) == [REPAIRED]
    assert f"the cell below is In[{failed.count}] with the fix" in fixed.text
    assert "line 4: `loss = torch.sqrt(weight.sum().clamp(min=1e-12))`" in fixed.text
    assert kernel.run(REPAIRED).status == "ok"


def test_a_report_without_a_fix_leaves_no_cell(kernel: Kernel) -> None:
    kernel.run("%unload_ext torchdebug_magics")
    kernel.run("%load_ext torchdebug_magics")
    assert "there is no report yet" in kernel.run("%torchdebug fix").text
    assert kernel.run("%%nanhunt\nimport torch\ntorch.ones(2).sum()").status == "ok"
    ran = kernel.run("%torchdebug fix")
    assert (next_cells(ran), "the last report has no fix" in ran.text) == ([], True)
