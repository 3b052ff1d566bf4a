"""Gauges that move in JupyterLab while torch computes: in their own cell, and only there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = """
import time
import torch
%load_ext torchdebug_magics
"""

# Each product computes for a while outside Python; the kept results let the gauge rise.
COMPUTE = """
%%memgauge -o gauge
kept = []
for _ in range(80):
    a = torch.rand(600, 600)
    for _ in range(8):
        a = (a @ a) / a.norm()
    kept.append(torch.ones(2 << 20))
"""

OTHER = """
later = []
for _ in range(40):
    later.append(torch.ones(2 << 20))
    time.sleep(0.1)
"other done"
"""


@pytest.mark.thorough
def test_one_gauge_over_all_cells_moves_in_its_own(lab: Lab) -> None:
    lab.open("lasting.ipynb", [SETUP, "%memgauge on", OTHER, "%memgauge off"])
    lab.start_all()
    lab.page.wait_for_function("() => window.seenTexts.filter(text => text.includes('Peak so far')).length >= 3", timeout=90_000)
    assert "Peak so far" in lab.text(1)
    lab.wait_for_end()
    assert "Peak so far" not in lab.text(1)
    assert lab.text(2).strip() == "'other done'"
    assert " left" in lab.text(3)


@pytest.mark.thorough
def test_the_saved_report_is_whole_in_a_new_kernel(lab: Lab) -> None:
    lab.open("saved.ipynb", [SETUP, COMPUTE, '%memmark "one"', 'more = torch.ones(50 << 20)\n%memmark "two"', "%memmark"])
    lab.run_all()
    saved = lab.save()
    assert "widget-view" not in json.dumps(saved["cells"])
    lab.reopen_with_a_new_kernel()
    assert " left" in lab.text(1)
    assert lab.cell(1).locator("meter").count() >= 3
    assert "RSS grew most, by" in lab.text(4)
    assert lab.cell(4).locator("img").count() == 1
