"""What someone in JupyterLab sees of a hunt, and of gauges: a view that moves, a report that stays, and nothing in the console."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import EACH_RAN, WIDGET_FAILURES
from tests.browser.test_memgauge import COMPUTE

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = """
import time
import torch
%load_ext torchdebug_magics
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

HUNT = """
%%nanhunt -o hunt
for step in range(60):
    time.sleep(0.05)
    x = torch.randn(32, 8)
    out = model(x)
    loss = out.pow(2).mean()
    if step == 50:
        loss = loss + (out - out).sum(1).log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CLEAN = """
%%nanhunt
for step in range(5):
    loss = model(torch.randn(32, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def outputs(document: dict, cell: int) -> list[dict]:
    return document["cells"][cell]["outputs"]


@pytest.fixture
def hunted(lab: Lab) -> Lab:
    """A notebook in which a NaN is found, and then memory measured."""
    lab.open("hunted.ipynb", [SETUP, HUNT, COMPUTE], may_stop=True)
    lab.start_all()
    return lab


def test_views_move_and_then_the_reports_stay_in_a_new_kernel(hunted: Lab) -> None:
    lab = hunted
    lab.page.wait_for_function("() => window.seenTexts.length >= 3", timeout=60_000)
    assert not lab.page.evaluate("() => window.runEnded"), "the view moved only when the cell had ended"
    moving = lab.seen_texts()
    assert any("step" in text for text in moving), moving
    lab.page.wait_for_function("() => window.seenTexts.filter(text => text.includes('Peak so far')).length >= 3", timeout=90_000)
    assert not lab.page.evaluate(EACH_RAN), "the gauges moved only when the cell had ended"

    lab.wait_for_each_cell()
    gauge = lab.text(2)
    assert " left" in gauge
    assert "Peak so far" not in gauge
    assert lab.cell(2).locator("meter").count() >= 3
    report = lab.text(1)
    assert "NaN" in report or "Inf" in report
    assert "In[2] line 8" in report
    assert "log" in report
    assert "NonFiniteError" in report
    assert lab.tables(1).count() >= 1

    document = lab.save()
    types = [set(output.get("data", ())) for output in outputs(document, 1)]
    assert not any("application/vnd.jupyter.widget-view+json" in kinds for kinds in types), types
    assert any({"text/html", "text/plain"} <= kinds for kinds in types), types
    assert "widgets" not in document["metadata"]
    assert len(json.dumps(outputs(document, 1))) < 100_000

    lab.reopen_with_a_new_kernel()
    assert (lab.text(1), lab.text(2)) == (report, gauge)
    assert lab.tables(1).count() >= 1
    for failure in WIDGET_FAILURES:
        assert failure not in lab.page.locator(".jp-Notebook").inner_text()
    assert lab.console_errors == []


@pytest.mark.thorough
def test_the_report_can_be_read_in_a_notebook_that_is_not_trusted(hunted: Lab) -> None:
    lab = hunted
    lab.wait_for_each_cell()
    report = lab.tables(1).first.inner_text()
    document = lab.save()
    for output in outputs(document, 1):
        if "text/html" in output.get("data", {}):
            output["metadata"]["changed"] = "elsewhere"  # as by someone else: the signature no longer holds
    lab.file.with_name("untrusted.ipynb").write_text(json.dumps(document))
    lab.open("untrusted.ipynb")
    assert lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.get(1).trusted") is False
    assert lab.tables(1).first.inner_text() == report
    assert lab.console_errors == []


@pytest.mark.thorough
def test_a_clean_run_says_what_was_checked(lab: Lab) -> None:
    lab.open("clean.ipynb", [SETUP, CLEAN])
    lab.run_all()
    report = lab.text(1)
    assert "5 steps" in report or "5 backward" in report, report
    assert "Error" not in report
    assert lab.console_errors == []
