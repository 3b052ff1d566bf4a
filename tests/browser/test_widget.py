"""What someone in JupyterLab sees of `-w`, alive and in a new kernel, and of a live view that ends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import WIDGET_FAILURES
from tests.browser.reading import complaints, resize

if TYPE_CHECKING:
    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SETUP = """
import time
import torch
from torch import nn
%load_ext torchdebug_magics
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_projection, self.feed_forward_network = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        return x + self.feed_forward_network(self.attention_projection(x))
net = nn.Sequential(*[Block() for _ in range(3)], nn.Linear(32, 7))
"""
WIDGET = "%shapes -w net (4, 32)"
LAYERS = """
%%nanhunt --layers -w
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
for step in range(3):
    model(torch.randn(32, 8)).pow(2).mean().backward()
"""
PLAIN = "import ipywidgets\nipywidgets.HTML('alive')"
HUNT = """
%%nanhunt
for step in range(30):
    time.sleep(0.05)
    out = net(torch.randn(16, 32))
    loss = out.pow(2).mean()
    if step == 25:
        loss = loss + (out - out).sum(1).log().mean()
    loss.backward()
"""
GRAPHS = """
%%memtrace
kept = []
for step in range(30):
    time.sleep(0.05)
    kept.append(net(torch.randn(16, 32)))
"""
SEEN = "output => output.offsetHeight > 0 && getComputedStyle(output).visibility !== 'hidden'"
HEIGHTS = """cells => {
    window.heights = cells.map(() => []);
    const look = () => {
        cells.forEach((at, number) => {
            const height = document.querySelectorAll('.jp-CodeCell')[at]?.querySelector('.jp-OutputArea')?.offsetHeight ?? 0;
            if (height !== window.heights[number].at(-1)) window.heights[number].push(height);
        });
        requestAnimationFrame(look);
    };
    look();
}"""


def seen(lab: Lab, cell: int) -> list[str]:
    """The texts of those outputs of a cell that can be seen."""
    outputs = lab.cell(cell).locator(".jp-OutputArea-output").all()
    return [output.inner_text() for output in outputs if output.evaluate(SEEN)]


def test_what_is_seen_of_widgets_and_then_in_a_new_kernel(lab: Lab) -> None:
    lab.open("widget.ipynb", [SETUP, WIDGET, LAYERS, PLAIN])
    assert lab.run_all()[-1] == "alive"
    lab.cell(1).locator(".torchdebug-tree").wait_for()
    (alive,) = seen(lab, 1)
    assert "filter" not in alive  # a placeholder is no text; the tree is
    assert "feed_forward_network" in alive
    a_heading_sorts_and_once_more_turns_the_order(lab)
    the_interactive_view_is_filtered_and_sorted_in_the_page(lab)
    assert lab.console_errors == []
    lab.page.evaluate("() => console.error('planted')")
    assert lab.console_errors == ["planted"]
    lab.save()
    lab.reopen_with_a_new_kernel()
    lab.cell(3).get_by_text(re.compile("|".join(WIDGET_FAILURES))).first.wait_for()  # this harness sees a dead widget
    (frozen,) = seen(lab, 1)
    assert "feed_forward_network" in frozen
    assert "widget" not in frozen.lower()


def a_heading_sorts_and_once_more_turns_the_order(lab: Lab) -> None:
    names = "() => [...document.querySelectorAll('.torchdebug-tree .row:not(.head) > b')].map(cell => cell.innerText.trim())"
    heading = lab.cell(1).locator(".torchdebug-tree .head").get_by_text("params", exact=True)
    heading.click()
    lab.page.wait_for_function(f"() => ({names})().includes('0.attention_projection')")  # sorted, it is a list of full names
    assert lab.cell(1).locator("select").first.evaluate("one => one.selectedOptions[0].innerText") == "params"
    largest = lab.page.evaluate(names)
    heading.click()
    lab.page.wait_for_function(f"([first]) => ({names})()[0] !== first", arg=[largest[0]])
    assert sorted(lab.page.evaluate(names)) == sorted(largest)


def the_interactive_view_is_filtered_and_sorted_in_the_page(lab: Lab) -> None:
    table = "document.querySelectorAll('.jp-CodeCell')[2].querySelectorAll('.widget-box table:has(thead) tbody tr')"
    rows = lab.cell(2).locator(".widget-box table:has(thead) tbody tr")
    before = rows.all_inner_texts()
    assert len(before) > 1
    needle = lab.cell(2).locator("input[placeholder='filter rows']").first
    needle.fill("Tanh")
    lab.page.wait_for_function(f"([count]) => {table}.length < count", arg=[len(before)])
    assert all("Tanh" in text for text in rows.all_inner_texts())
    needle.fill("no such layer")
    lab.page.wait_for_function(f"() => ![...{table}].some(row => row.innerText.includes('Tanh'))")
    needle.fill("")
    lab.page.wait_for_function(f"([count]) => {table}.length === count", arg=[len(before)])
    lab.cell(2).locator("select").first.select_option(label="type")
    lab.page.wait_for_function(f"([first]) => {table}[0].innerText !== first", arg=[before[0]])
    assert sorted(rows.all_inner_texts()) == sorted(before)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [700, 1300])
def test_a_widget_reads_well(lab: Lab, width: int) -> None:
    lab.open("narrow.ipynb", [SETUP, WIDGET])
    resize(lab.page, width, 1600)
    lab.run_all()
    lab.cell(1).locator(".torchdebug-tree").wait_for()
    assert complaints(lab.page, all_in_sight=False) == []
    scrolled = """() => [...document.querySelectorAll('.jp-CodeCell .jp-OutputArea *')].filter(one => {
        const style = getComputedStyle(one);
        return one.scrollHeight > one.clientHeight + 1 && ['auto', 'scroll'].includes(style.overflowY) && one.clientHeight;
    }).map(one => one.className)"""
    assert len(lab.page.evaluate(scrolled)) <= 1


@pytest.mark.thorough
def test_a_live_view_gives_way_to_the_report_without_a_jump(lab: Lab) -> None:
    lab.open("calm.ipynb", [SETUP, HUNT, GRAPHS], may_stop=True)
    resize(lab.page, 1300, 3000)
    lab.page.evaluate(HEIGHTS, [1, 2])
    lab.start_all()
    lab.wait_for_each_cell()
    for heights in lab.page.evaluate("() => window.heights"):
        live = max(heights[1:-1], default=0)
        first = heights.index(next(height for height in heights if height > 40))
        assert live > 0
        assert min(heights[first:]) > 40, f"the output shrank to nothing: {heights}"
