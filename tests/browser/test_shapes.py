"""What someone in JupyterLab sees of a model: a tree of 1000 modules that opens, filters and sorts, and a report that stays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = """
import torch
from torch import nn
%load_ext torchdebug_magics

class Part(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.a, self.act, self.b, self.norm = nn.Linear(32, wide), nn.GELU(), nn.Linear(wide, 32), nn.LayerNorm(32)
    def forward(self, x):
        return self.norm(x + self.b(self.act(self.a(x))))

big = nn.Sequential(*[nn.Sequential(*[Part(32 + (10 * i + j) % 7) for j in range(10)]) for i in range(20)])

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 5), nn.Linear(256, 10)
    def forward(self, x):
        x = self.conv(x).relu().flatten(1)
        return self.fc(x)
"""
BIG = "%shapes -w big (4, 32)"
BROKEN = "%shapes --plot Broken() (1, 3, 32, 32)"


def rows(lab: Lab) -> Locator:
    """Those of the tree that can be seen."""
    return lab.cell(1).locator(".torchdebug-tree .row:not(.head):visible")


def waited_for(lab: Lab, seen: str) -> None:
    """Wait until a row says `seen`."""
    rows(lab).filter(has_text=seen).first.wait_for(timeout=10_000)


def test_what_is_seen_of_a_model(lab: Lab) -> None:
    lab.open("shapes.ipynb", [SETUP, BIG, BROKEN])
    lab.run_all()
    lab.cell(1).locator(".torchdebug-tree").wait_for()
    a_tree_of_1000_modules_is_opened_filtered_and_sorted(lab)
    a_saved_one_reads_without_its_kernel_and_without_trust(lab)
    assert lab.console_errors == []


def a_tree_of_1000_modules_is_opened_filtered_and_sorted(lab: Lab) -> None:
    everything = rows(lab).count()
    assert everything == 21, "the root and its parts"

    rows(lab).nth(1).click()
    assert rows(lab).count() == everything + 10
    rows(lab).nth(1).click()
    assert rows(lab).count() == everything
    lab.cell(1).get_by_text("expand all").click()
    lab.page.wait_for_function("() => document.querySelectorAll('.torchdebug-tree details:not([open])').length === 0")
    assert rows(lab).count() == 1021
    lab.cell(1).get_by_text("collapse all").click()
    lab.page.wait_for_function("() => document.querySelectorAll('.torchdebug-tree details[open]').length === 0")
    assert rows(lab).count() == 1

    needle = lab.cell(1).locator("input[placeholder='filter rows']").first
    needle.fill("7.3.norm")
    waited_for(lab, "norm")
    assert [text.split()[0] for text in rows(lab).locator("b").all_inner_texts()] == ["Sequential", "7", "3", "norm", "17", "3", "norm"]
    needle.fill("LayerNorm")
    lab.page.wait_for_function("() => document.querySelectorAll('.torchdebug-tree .row').length === 422")

    lab.cell(1).locator("select").first.select_option(label="params")
    waited_for(lab, "19.9.norm")
    assert rows(lab).count() == 200, "sorted, it is a list"
    needle.fill("")
    waited_for(lab, "Sequential")
    assert [text.split()[0] for text in rows(lab).locator("b").all_inner_texts()][:3] == ["Sequential", "6", "13"]


def a_saved_one_reads_without_its_kernel_and_without_trust(lab: Lab) -> None:
    said = lab.text(2)
    assert "fc" in said
    assert "In[1] line" in said
    lab.cell(2).locator(".jp-OutputArea-output").first.scroll_into_view_if_needed()

    document = lab.save()
    tree, broken = (document["cells"][cell]["outputs"] for cell in (1, 2))
    assert len(tree[0]["data"]["text/html"]) < 100_000
    assert len(json.dumps(broken)) < 100_000
    for output in broken:
        output["metadata"]["changed"] = "elsewhere"  # as by someone else: the signature no longer holds
    document["cells"] = [document["cells"][0], document["cells"][2]]
    document["metadata"].pop("widgets", None)
    lab.file.with_name("saved.ipynb").write_text(json.dumps(document))
    lab.open("saved.ipynb")
    assert lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.cells.get(1).trusted") is False
    assert lab.text(1) == said
    assert lab.tables(1).count() >= 3
