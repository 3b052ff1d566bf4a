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

# A network that learns how alike two images are; one of the pairs holds the same image twice.
CELLS = (
    """
import torch
from torch import nn

%load_ext torchdebug_magics

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
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
)


def main() -> None:
    """Run the notebook once, and take the picture in both themes."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        notebooks, state = Path(made, "notebooks"), Path(made, "state")
        notebooks.mkdir()
        with harness.serve(notebooks, state) as server:
            browser = playwright.chromium.launch(executable_path=harness.chromium(), headless=True, args=list(harness.CHROMIUM_FLAGS))
            # So high that the whole notebook fits: JupyterLab draws no cell that is out of sight.
            page = browser.new_page(viewport={"width": 1060, "height": 4000}, device_scale_factor=2)
            lab = harness.Lab(server, page, PICTURES)
            lab.open("pictures.ipynb", CELLS)
            lab.run_all()
            page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }")  # no toolbar in the picture
            for theme, word in ((harness.LIGHT, "light"), (harness.DARK, "dark")):
                lab.theme(theme)
                page.wait_for_timeout(500)  # the colours fade in
                page.screenshot(path=str(PICTURES / f"nanhunt_{word}.png"), clip=_to_the_code(lab.cell(1)))
            browser.close()
    print(f"made {PICTURES}/nanhunt_light.png and nanhunt_dark.png")


def _to_the_code(cell: Locator) -> FloatRect:
    """From the top of the cell to the end of the lines that its report quotes."""
    whole = cell.bounding_box()
    end = cell.locator(".jp-RenderedHTMLCommon pre").first.bounding_box()
    if whole is None or end is None:
        msg = "the cell shows no report that quotes a line"
        raise RuntimeError(msg)
    return {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": end["y"] + end["height"] - whole["y"] + MARGIN}


if __name__ == "__main__":
    main()
