"""A class that lacks what torch calls, or that is called in the place of an instance: named, and repaired by the edits alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.instruments.shapes.failed_cells import after_error
from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
x, y = torch.randn(6, 4), torch.randint(3, (6,))
net = nn.Linear(4, 3)
"""
CASES = {
    "no super": (
        """\
class Net(nn.Module):
    def __init__(self, width):
        self.fc = nn.Linear(4, width)

    def forward(self, x):
        return self.fc(x)
out = Net(3)(x)
""",
        "`Net.__init__` does not call `super().__init__()` first",
    ),
    "super too late": (
        """\
class Net(nn.Module):
    def __init__(self):
        self.scale = nn.Parameter(torch.ones(4))
        super().__init__()

    def forward(self, x):
        return self.scale * x
out = Net()(x)
""",
        "`Net.__init__` does not call `super().__init__()` first",
    ),
    "the class that it is derived from": (
        """\
class Base(nn.Module):
    def __init__(self, width):
        \'\'\'Layers of that width.\'\'\'
        self.fc = nn.Linear(4, width)

class Net(Base):
    def __init__(self):
        super().__init__(3)

    def forward(self, x):
        assert Base.__init__.__doc__
        return self.fc(x)
out = Net()(x)
""",
        "`Base.__init__` does not call `super().__init__()` first",
    ),
    "super with an argument, too late": (
        """\
class Base(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(4, width)

class Net(Base):
    def __init__(self, width):
        self.scale = nn.Parameter(torch.ones(4))
        super().__init__(width)

    def forward(self, x):
        return self.fc(self.scale * x)
out = Net(3)(x)
""",
        "`Net.__init__` does not call `super().__init__()` first",
    ),
    "mistyped": (
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def foward(self, x):
        return self.fc(x)
out = Net()(x)
""",
        "`Net` has no method `forward`: `foward` is mistyped",
    ),
    "indented": (
        """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

        def forward(self, x):
            y = self.fc(x)
            return y
out = Net()(x)
""",
        "`Net` has no method `forward`: `def forward` stands inside of another method",
    ),
    "no length": (
        """\
class Rows(Dataset):
    def __init__(self, rows):
        self.options, self.rows = {"factor": 2}, rows

    def __getitem__(self, i):
        factor = self.options["factor"]
        return factor * self.rows[i]
for batch in DataLoader(Rows(x), batch_size=2, shuffle=True):
    net(batch)
""",
        "`Rows` has no `__len__`, which a DataLoader asks",
    ),
    "loss class": (
        "loss = nn.CrossEntropyLoss(net(x), y)\nloss.backward()\n",
        "`nn.CrossEntropyLoss` is a class, and is given tensors as its options",
    ),
    "loss variable": ("criterion = nn.CrossEntropyLoss\nloss = criterion(net(x), y)\nloss.backward()\n", "`criterion` is a class"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_edits_repair_the_class(case: tuple[str, str], shell: InteractiveShell) -> None:
    from IPython.utils.capture import capture_output

    cell, headline = case
    report = after_error(shell, SETUP, cell)
    assert report.verdict.startswith(headline), report.verdict
    assert report.fix_state in {"verified", "compiles"}
    (new,) = fixed_source(report).values()
    with capture_output():
        assert shell.run_cell(new, store_history=True).success


def test_another_class_is_left_alone(shell: InteractiveShell) -> None:
    report = after_error(shell, SETUP, "class Odd(nn.Module):\n    pass\nOdd()(x)")
    assert report.verdict.startswith("`Odd` has no method `forward`")
    assert report.edits == ()
