"""A size that a true division made: the edit divides integers, and the cell runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import torch
from torch import nn
import torch.nn.functional as F
n, x = 20, torch.randn(4, 6)
class Split(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
    def forward(self, x):
        return x.reshape(x.shape[0], self.width / 2, 2)
class Half(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.half = width / 2
    def forward(self, x):
        return x.reshape(x.shape[0], self.half, 2)
class Padded(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        padding = (kernel - 1) / 2
        self.conv = nn.Conv2d(3, 4, kernel, padding=padding)
    def forward(self, x):
        return self.conv(x)
"""
CELLS = {
    "width of a layer": ("layer = nn.Linear(n / 2, 10)", "n / 2"),
    "view": ("y = x.view(x.size(0) / 2, -1)", "x.size(0) / 2"),
    "zeros": ("z = torch.zeros(n / 4)", "n / 4"),
    "slice": ("half = x.shape[1] / 2\nfirst = x[:, :half]", "x.shape[1] / 2"),
    "split": ("parts = torch.split(x, 6 / 2, dim=1)", "6 / 2"),
    "range": ("for i in range(len(x) / 2):\n    x + i  # a row", "len(x) / 2"),
    "randperm": ("p = torch.randperm(len(x) / 2)", "len(x) / 2"),
    "interpolate": ("F.interpolate(torch.randn(1, 3, 8, 8), size=(8 / 2, 4))", "8 / 2"),
    "of a module": ("net = Split(6)\nnet(x)", "self.width / 2"),
    "an attribute": ("net = Half(6)\nnet(x)", "width / 2"),
    "padding": ("net = Padded(3)\nnet(torch.randn(1, 3, 8, 8))", "(kernel - 1) / 2"),
}


@pytest.mark.parametrize("case", CELLS.values(), ids=CELLS)
def test_the_edit_divides_integers(case: tuple[str, str], shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    cell, division = case
    with capture_output():
        shell.run_cell(SETUP, store_history=True)
        first = shell.execution_count - 1
        assert isinstance(shell.run_cell(cell, store_history=True).error_in_exec, TypeError)
        shell.run_cell("%torchdebug -o report", store_history=True)
        report = shell.user_ns["report"]
        assert report.verdict.startswith(f"`{division}` is a float, where an integer is expected"), report.verdict
        fixed = fixed_source(report)
        for number, source in ((first, SETUP), (first + 1, cell)):
            result = shell.run_cell(fixed.get(number, source), store_history=True)
    assert result.error_in_exec is None
    assert result.error_before_exec is None
    assert fixed[next(iter(fixed))].count("#") == (SETUP if first in fixed else cell).count("#")


@pytest.mark.parametrize(
    "cell",
    [
        *("torch.zeros(2.5)", "torch.ones(3) @ 'a'", "nn.Linear(x / 2, 10)", "x[:, 1.5:]", "[1, 2][3 / 4]", "nn.Linear(7 / 2, 3)"),
        *("k = 3.0\nnn.Conv2d(3, 8, k)(torch.randn(1, 3, 8, 8) / 2)", "torch.zeros(int(7 / 2), 3.0)"),
        "torch.utils.data.random_split(x, [len(x) * 0.5, len(x) / 2])",
    ],
)
def test_other_errors_of_types_are_no_divisions(cell: str, shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP, store_history=True)
        assert shell.run_cell(cell, store_history=True).error_in_exec is not None
        shell.run_cell("%torchdebug -o report", store_history=True)
    assert "divides integers" not in shell.user_ns["report"].verdict
