"""NaN that NumPy makes in a data set: its line and the sample; data that hold NaN have no such line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

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
    "a division by a spread of 0": ("rows[9] = 2.0", "x = (x - x.mean()) / x.std()", "replace a divisor of 0"),
    "the root of a variance below 0": ("rows[9] = -1.0", "x = (x - 0.5) ** 0.5 if x[0] < 0 else x", "to at least 0"),
    "a logarithm of 0": ("rows[9, 2] = 0.0", "x = np.log(x)", "this logarithm is taken of above 0"),
    "a root, and a division behind it": ("rows[9] = 0.0", "s = np.sqrt((x * x).mean() - 1e-3); x = x / s", "to at least 0"),
}


def hunted(shell: InteractiveShell, spoilt: str, made: str) -> Any:
    from IPython.utils.capture import capture_output

    with capture_output():
        shell.run_cell(SETUP.replace("{made}", made) + spoilt, store_history=True)
        shell.run_cell("%%nanhunt -o report\n" + TRAINING, store_history=True)
    return shell.user_ns.pop("report")


@pytest.mark.parametrize("case", BIRTHS.values(), ids=BIRTHS)
def test_the_line_and_the_sample_are_named(case: tuple[str, str, str], shell: InteractiveShell) -> None:
    spoilt, made, fix = case
    report = hunted(shell, spoilt, made)
    assert report.finding.location.source == made
    assert "sample 9 of the data set" in report.finding.explanation
    assert fix in report.finding.fix


def test_data_that_hold_nan_are_not_blamed_on_a_line(shell: InteractiveShell) -> None:
    report = hunted(shell, "rows[9, 2] = np.nan", "x = x * 2.0")
    assert "data set non-finite" not in report.finding.explanation
    assert report.finding.phase == "data"


def test_what_the_data_set_counts_is_as_without_the_hunt(shell: InteractiveShell) -> None:
    hunted(shell, "rows[9] = 2.0", "x = (x - x.mean()) / x.std()")
    assert shell.user_ns["data"].reads == 12
    assert shell.user_ns["np"].geterr()["invalid"] == "warn"
