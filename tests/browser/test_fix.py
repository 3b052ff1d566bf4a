"""The repaired cell appears below in JupyterLab and runs; the widget copies the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = "%load_ext torchdebug_magics\nimport torch"
CELL = "%%nanhunt -w\nweight = torch.zeros(3, requires_grad=True)\nloss = torch.sqrt(weight.sum())\nloss.backward()"
FIX = "loss = torch.sqrt(weight.sum().clamp(min=1e-12))"
SOURCES = "() => [...window.jupyterapp.shell.currentWidget.content.model.cells].map(cell => cell.sharedModel.getSource())"

RUN_CELL = """at => {
    window.jupyterapp.shell.currentWidget.content.activeCellIndex = at;
    return window.jupyterapp.commands.execute('notebook:run-cell');
}"""


def test_the_repaired_cell_is_there_and_runs(lab: Lab) -> None:
    lab.open("fix.ipynb", [SETUP, CELL, "%torchdebug fix"], may_stop=True)
    lab.start_all()
    lab.cell(1).get_by_text("copy the fix").wait_for()
    lab.page.evaluate("() => { navigator.clipboard.writeText = text => { window.copied = text; }; }")  # the system's needs the focus
    lab.cell(1).get_by_text("copy the fix").click()
    lab.cell(1).get_by_text("copied").wait_for()
    assert lab.page.evaluate("() => window.copied") == FIX
    lab.page.wait_for_function(f"([fix]) => ({SOURCES})().at(-1).includes(fix)", arg=[FIX])
    lab.page.evaluate(RUN_CELL, 3)
    lab.page.wait_for_function("() => [...document.querySelectorAll('.jp-CodeCell')].at(-1).innerText.includes('No NaN')")
    assert lab.console_errors == []
