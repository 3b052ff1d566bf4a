"""Every name that the docs give a report, and what it is made of, is in `to_dict()` and in the JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchdebug_magics import catalog
from torchdebug_magics.report import _plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.doors import Door

DOCS = Path(__file__).parents[2] / "docs/magics"
CLASS = re.compile(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
BASE = frozenset({"verdict", "title", "problems", "notes", "cut_short"})

SETUP = """\
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x, y = torch.randn(8, 10), torch.randint(0, 3, (8,))
model = nn.Sequential(nn.Linear(10, 4), nn.Sigmoid(), nn.Linear(4, 3))
layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
opt = torch.optim.Adam(model.parameters())
loss = F.cross_entropy(model(x), y)
"""
STEPS = """\
for step in range(6):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
"""
CELLS = {
    "NanReport": ("nanhunt", STEPS.replace("y)", "y).log().log()"), {"keep_going": True}),
    "ShapesReport": ("shapes", STEPS, {}),
    "MemtraceReport": ("memtrace", f"kept = []\n{STEPS}    kept.append(model(x))", {}),
    "GaugeReport": ("memgauge", STEPS, {}),
    "DeterministicReport": ("deterministic", STEPS, {}),
    "AutogradReport": ("autograd", STEPS.replace("    opt.zero_grad()\n", ""), {}),
    "GradReport": ("gradwatch", STEPS, {}),
    "HangReport": ("hangwatch", STEPS, {}),
    "WatchReport": ("watch", STEPS, {}),
}
LINES = {
    "GraphReport": ("autograd", ("loss",)),
    "StatusReport": ("deterministic", ("'status'",)),
    "MarkReport": ("memmark", ("'before'",)),
    "MarksReport": ("memmark", ()),
    "MemcleanReport": ("memclean", ()),
    "OverfitReport": ("overfit", ("model", "(x, y)", "F.cross_entropy")),
    "ShrinkReport": ("shrink", ("layers", "torch.randn(2,4)")),
    "StepzeroReport": ("stepzero", ("model",)),
}


def documented() -> Iterator[tuple[str, str, set[str]]]:
    """(instrument, class, names) of each class that the pages of the magics describe."""
    for path in sorted(DOCS.glob("*.md")):
        for name, text in CLASS.findall(path.read_text(encoding="utf-8")):
            if names := set(NAME.findall(text)):
                yield path.stem, name, names


NAMES = {(instrument, name): names for instrument, name, names in documented()}


def values_in(value: Any) -> Iterator[Any]:
    """A report and the values of this package that it holds."""
    if type(value).__module__.startswith("torchdebug_magics"):
        yield value
        value = list(value) if isinstance(value, tuple) else list(vars(value).values())
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from values_in(part)


def check(report: Any, instrument: str, name: str) -> None:
    assert type(report).__name__ == name
    for data in (report.to_dict(), json.loads(report.to_json())):
        missing = (NAMES[instrument, name] | BASE) - data.keys()
        assert not missing, f"documented, and not in the dict: {sorted(missing)}"
        assert data["title"] == report.title
    for value in values_in(report):
        assert not NAMES.get((instrument, type(value).__name__), set()) - _plain(value).keys(), type(value).__name__


def test_the_docs_describe_every_report_and_a_cell_here_makes_each() -> None:
    known = {name for _, name in NAMES if name.endswith("Report")}
    assert known == CELLS.keys() | LINES.keys()
    assert {instrument for instrument, _ in NAMES} == {row.name for row in catalog.instruments()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CELLS)
def test_the_report_of_a_cell_holds_what_the_docs_name(name: str, observe: Door) -> None:
    instrument, body, options = CELLS[name]
    observe.plain(SETUP)
    check(observe(instrument, body, **options).report, catalog.instrument(instrument).name, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LINES)
def test_the_report_of_a_line_holds_what_the_docs_name(name: str, observe: Door) -> None:
    instrument, subjects = LINES[name]
    observe.plain(SETUP)
    observed = observe.examine(instrument, subjects)
    if instrument == "memmark" and subjects and observed.door == "function":
        assert observed.report is None  # it prints, for use in the middle of other code; its magic keeps the report
    else:
        check(observed.report, instrument, name)
