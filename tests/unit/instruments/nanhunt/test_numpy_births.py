"""NaN that NumPy makes in a data set: its line, and the statement with which the sample is finite; data that hold NaN have neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics import fixed_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

SETUP = """\
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
rows = np.random.default_rng(0).random((24, 6)).astype(np.float32) + 0.1
class Data(Dataset):
    def __init__(self):
        self.reads = 0
    def __len__(self):
        return len(rows)
    def __getitem__(self, i):
        self.reads += 1
        x = rows[i]
        {made}
        return torch.from_numpy(np.asarray(x, dtype=np.float32)), torch.tensor([1.0])
"""
TRAINING = """\
data = Data()
net = nn.Linear(6, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=4):
    loss = ((net(x) - y) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
BIRTHS = {
    "a division by a spread of 0": ("rows[9] = 2.0", "x = (x - x.mean()) / x.std()", "np.where(x.std() == 0, 1, x.std())"),
    "the root of a variance below 0": ("rows[9] = -1.0", "x = (x - 0.5) ** 0.5 if x[0] < 0 else x", "np.maximum(x - 0.5, 0) ** 0.5"),
    "a logarithm of 0": ("rows[9, 2] = 0.0", "x = np.log(x)", "np.log(np.maximum(x, 1e-12))"),
    "a root, and a division behind it": (
        "rows[9] = 0.0",
        "s = np.sqrt((x * x).mean() - 1e-3); x = x / s",
        "",
    ),
}


def hunted(shell: InteractiveShell, spoilt: str, made: str) -> tuple[Any, str]:
    from IPython.utils.capture import capture_output

    with capture_output():
        cell = SETUP.replace("{made}", made) + spoilt
        shell.run_cell(cell, store_history=True)
        shell.run_cell("%%nanhunt -o report\n" + TRAINING, store_history=True)
    return shell.user_ns.pop("report"), cell


@pytest.mark.parametrize("case", BIRTHS.values(), ids=BIRTHS)
def test_the_line_is_named_and_the_statement_with_which_it_is_finite(case: tuple[str, str, str], shell: InteractiveShell) -> None:
    spoilt, made, wanted = case
    report, cell = hunted(shell, spoilt, made)
    assert report.finding.location.source == made
    assert "sample 9 of the data set" in report.finding.explanation
    if not wanted:
        return
    assert report.finding.fix_state == "verified"
    (fixed,) = fixed_source(report).values()
    assert wanted in fixed
    assert shell.run_cell(fixed).success
    assert shell.run_cell(TRAINING).success
    assert bool(torch_isfinite(shell))
    assert cell.count("\n") == fixed.count("\n")


def torch_isfinite(shell: InteractiveShell) -> Any:
    return shell.user_ns["net"].weight.isfinite().all()


def test_data_that_hold_nan_are_not_blamed_on_a_line(shell: InteractiveShell) -> None:
    report, _ = hunted(shell, "rows[9, 2] = np.nan", "x = x * 2.0")
    assert "data set non-finite" not in report.finding.explanation
    assert report.finding.phase == "data"


def test_what_the_data_set_counts_is_as_without_the_hunt(shell: InteractiveShell) -> None:
    hunted(shell, "rows[9] = 2.0", "x = (x - x.mean()) / x.std()")
    assert shell.user_ns["data"].reads == 12
    assert shell.user_ns["np"].geterr()["invalid"] == "warn"
