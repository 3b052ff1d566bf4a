"""Make the pictures of the README from a real run: JupyterLab in headless Chromium, in its light and in its dark theme."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the tests are no installed package

from tests.browser import lab as harness  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Locator

PICTURES = ROOT / "pictures"
MARGIN = 12

# A network that learns how alike two images are: one of the pairs holds the same image twice, all scores are kept with their graphs, and
# noise comes from a generator without a seed. And a network for images, one of whose sizes was guessed.
CELLS = (
    """
import numpy as np
import torch
from torch import nn

%load_ext torchdebug_magics

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters())
pairs = torch.rand(20, 2, 16, 8, 8)
pairs[5, 1, 3] = pairs[5, 0, 3]
""",
    """
%%nanhunt
for left, right in pairs:
    distance = (model(left) - model(right)).pow(2).sum(1).sqrt()
    loss = distance.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 5)
        self.out = nn.Linear(1024, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.conv(x), 3).relu()
        return self.out(x.flatten(1))


images = torch.rand(4, 3, 32, 32)
%shapes Classifier() images
""",
    """
%%memtrace
scores = []
for left, right in pairs:
    score = (model(left) - model(right)).pow(2).sum(1)
    scores.append(score)
""",
    """
%%deterministic --verify
noise = np.random.default_rng()
for left, right in pairs[6:16]:
    left = left + torch.from_numpy(noise.normal(size=left.shape)).float()
    loss = (model(left) - model(right)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
)
# A picture, the cell that it is of, and the last of what it shows.
SHOWN = (
    ("nanhunt", 1, ".jp-RenderedHTMLCommon pre"),
    ("shapes", 2, ".jp-RenderedHTMLCommon pre"),
    ("memtrace", 3, ".jp-RenderedHTMLCommon div:has(> table img)"),
    ("deterministic", 4, ".jp-RenderedHTMLCommon pre"),
)


def main() -> None:
    """Run the notebook once, and take the pictures in both themes."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        notebooks, state = Path(made, "notebooks"), Path(made, "state")
        notebooks.mkdir()
        with harness.serve(notebooks, state) as server:
            browser = playwright.chromium.launch(executable_path=harness.chromium(), headless=True, args=list(harness.CHROMIUM_FLAGS))
            # So high that the whole notebook fits: JupyterLab draws no cell that is out of sight.
            page = browser.new_page(viewport={"width": 1060, "height": 9000}, device_scale_factor=2)
            lab = harness.Lab(server, page, PICTURES)
            lab.open("pictures.ipynb", CELLS, may_stop=True)
            lab.start_all()
            lab.wait_for_each_cell()
            page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }")  # no toolbar in the picture
            for theme, word in ((harness.LIGHT, "light"), (harness.DARK, "dark")):
                lab.theme(theme)
                page.wait_for_timeout(500)  # the colours fade in
                for name, cell, last in SHOWN:
                    page.screenshot(path=str(PICTURES / f"{name}_{word}.png"), clip=_down_to(lab.cell(cell), last))
            browser.close()
    print(f"made, light and dark, in {PICTURES}: {', '.join(name for name, _, _ in SHOWN)}")


def _down_to(cell: Locator, last: str) -> FloatRect:
    """From the top of the cell to the end of the first thing of its report that is `last`."""
    whole = cell.bounding_box()
    end = cell.locator(last).first.bounding_box()
    if whole is None or end is None:
        msg = f"the cell shows no {last}"
        raise RuntimeError(msg)
    return {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": end["y"] + end["height"] - whole["y"] + MARGIN}


if __name__ == "__main__":
    main()
