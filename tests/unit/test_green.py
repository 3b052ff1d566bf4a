"""Green means that nothing is wrong: cells that are not fine, through both doors, each beside the same cell without the fault."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchdebug_magics
from tests.doors import DOORS
from torchdebug_magics import catalog
from torchdebug_magics.html.page import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.doors import Door, Observe
    from torchdebug_magics.html.page import Page

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(64, 10), torch.randint(0, 3, (64,))
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """\
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
METRIC = "accuracy = (model(x).argmax(1) == labels).float().mean()\n"
LEAKS = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(10, 32), nn.Linear(32, 3)
    def forward(self, x):
        hidden = self.body(x).relu()
        return self.head(hidden - hidden.mean({dims}, keepdim=True))
model = Net()
"""


@dataclass(frozen=True)
class Cell:
    """A cell that is not fine, and the part of it to change so that it is."""

    name: str
    instrument: str
    body: str
    fault: str
    repair: str
    row: str = ""
    """What the row that says so must hold."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> str:
        assert self.fault in self.body
        return self.body.replace(self.fault, self.repair)


CELLS = (
    Cell(
        "no zero_grad() in a training that learns",
        "overfit",
        f"{HEAD}opt = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
        f"for x, y in DataLoader(TensorDataset(x, y), 8):\n{STEP.replace('    opt.zero_grad()', '    pass')}",
        "    pass",
        "    opt.zero_grad()",
        "zero_grad() is missing",
    ),
    Cell(
        "a learning rate of 0 from step 48 on",
        "gradwatch",
        f"{HEAD}y = x[:, :3].argmax(1)\nlast = 48\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: max(0, 1 - step / last))\n"
        f"for step in range(64):\n{STEP}    schedule.step()\n",
        "last = 48",
        "last = 64",
        "the updates from step 48 on change nothing",
    ),
    Cell(
        "a loss that stays at that of guessing",
        "gradwatch",
        f"{HEAD}for step in range(60):\n    x = torch.randn(64, 10)\n    y = torch.randint(0, 3, (64,))\n{STEP}",
        "y = torch.randint(0, 3, (64,))",
        "y = x[:, :3].argmax(1)",
        "= ln 3: it does not beat guessing",
    ),
    Cell(
        "backward passes that only add up",
        "autograd",
        f"{HEAD}for step in range(3):\n{STEP}".replace("    opt.zero_grad()\n", "").replace("    opt.step()\n", "    # update\n"),
        "    # update\n",
        "    opt.step()\n    opt.zero_grad()\n",
    ),
    Cell(
        "an accidental broadcast after the step",
        "shapes",
        f"{HEAD}labels = y[:, None]\nif True:\n{STEP}{METRIC}",
        "labels = y[:, None]",
        "labels = y",
    ),
    Cell(
        "figures that stay open",
        "memtrace",
        f"{HEAD}import matplotlib.pyplot as plt\nplt.switch_backend('agg')\n"
        f"for step in range(22):\n{STEP}    plt.figure(figsize=(10, 8)).canvas.draw()\n    # close\n",
        "    # close",
        "    plt.close()",
        "of this process",
    ),
)
SLOW = ("function", "memtrace")
"""Four seconds, for what the magic shows as well."""


def shown(name: str, report: Any) -> Page:
    return catalog.instrument(name).page(report)


def rows_of(page: Page) -> str:
    return " ".join(f"{name} {text}" for block in page.blocks if isinstance(block, Facts) for name, text in block.rows)


@pytest.fixture(autouse=True)
def no_figure_stays_open() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("observe", "cell"),
    [
        pytest.param(door, cell, id=f"{door}-{cell.name}", marks=pytest.mark.thorough if (door, cell.instrument) == SLOW else ())
        for door in DOORS
        for cell in CELLS
    ],
    indirect=["observe"],
)
def test_what_was_green_is_a_caution_and_the_repaired_cell_is_green(cell: Cell, observe: Observe) -> None:
    observed = observe(cell.instrument, cell.body, **cell.options)
    assert observed.error is None
    page = shown(cell.instrument, observed.report)
    assert page.status == "warn", page.headline
    assert cell.row in rows_of(page)
    assert "healthy" not in observed.report.verdict
    assert "no growth" not in observed.report.verdict
    repaired = shown(cell.instrument, observe(cell.instrument, cell.healthy, **cell.options).report)
    assert repaired.status == "good", repaired.headline


@pytest.mark.parametrize(("dims", "status"), [(0, "warn"), (1, "good")])
def test_a_batch_leak_that_overfit_meets_is_a_caution(dims: int, status: str, observe: Door) -> None:
    observe.plain(HEAD + LEAKS.format(dims=dims) + "opt = torch.optim.Adam(model.parameters(), lr=1e-2)\nbatch = (x[:8], y[:8])\n")
    report = observe.examine("overfit", ("model", "batch", "F.cross_entropy", "opt")).report
    page = shown("overfit", report)
    assert (report.passed, page.status) == (True, status)
    assert ("the output for sample 0 depends on" in rows_of(page)) is (status == "warn")


@pytest.mark.parametrize(("seed", "status"), [("pass", "warn"), ("torch.manual_seed(0)", "good")])
def test_a_cell_that_another_run_makes_different_is_a_caution(seed: str, status: str, shell: Any) -> None:
    shell.run_cell("import torch")
    shell.run_cell(f"%%deterministic --verify -q -o report\n{seed}\ntotal = torch.rand(3).sum()")
    report = shell.user_ns["report"]
    assert report.verified
    assert shown("deterministic", report).status == status


def test_a_function_that_another_run_makes_different_is_a_caution() -> None:
    report = torchdebug_magics.verify(lambda: torch.rand(3).sum())
    assert report.verified
    assert shown("deterministic", report).status == "warn"


@pytest.mark.parametrize("name", ["nanhunt", "autograd", "gradwatch", "memtrace", "shapes", "memgauge", "hangwatch"])
def test_a_watch_that_an_error_cut_short_is_a_caution(name: str, observe: Observe) -> None:
    observed = observe(name, f"{HEAD}for step in range(6):\n{STEP}    if step == 4:\n        raise LookupError")
    assert isinstance(observed.error, LookupError)
    assert observed.report.cut_short == "LookupError"
    assert shown(name, observed.report).status == "warn"


@pytest.mark.parametrize(("failing", "kinds"), [("    assert step < 2\n", []), ("", ["never_stepped"])])
def test_a_step_that_an_error_prevented_is_not_missed(failing: str, kinds: list[str], observe: Observe) -> None:
    passes = STEP.replace("    opt.zero_grad()\n", "").replace("    opt.step()\n", failing)
    report: Any = observe("autograd", f"{HEAD}for step in range(3):\n{passes}").report
    assert [finding.kind for finding in report.findings] == kinds
