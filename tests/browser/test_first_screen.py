"""The first 600 pixels of a report answer: what, where, what to change. In JupyterLab, below the cell, error box and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import lab as harness
from tests.browser.gallery import CELLS, SETUP
from tests.browser.reading import resize, stand_still

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

SCREEN = 600
WIDTHS = (1300, 700)
THEMES = {"light": harness.LIGHT, "dark": harness.DARK}
# Where each part of a cell's report ends, in pixels below the top of its outputs; None where there is no such part.
ENDS = """cell => {
    const outputs = [...cell.querySelectorAll('.jp-OutputArea-output')].filter(output => output.offsetHeight);
    const report = outputs.map(output => output.querySelector('div[style*="1100px"]')).filter(Boolean).at(-1);
    if (!report) return {said: cell.innerText};
    const top = outputs[0].getBoundingClientRect().top, bottom = element => element && element.getBoundingClientRect().bottom - top;
    const size = element => parseFloat(getComputedStyle(element).fontSize);
    const speaks = element => [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const headline = [...report.querySelectorAll('div')].filter(speaks).reduce((one, other) => size(one) >= size(other) ? one : other);
    const fix = [...report.querySelectorAll('th')].find(name => name.innerText.trim() === 'fix');
    const line = [...report.querySelectorAll('pre span')].find(line => line.innerText.startsWith('→'));
    return {headline: bottom(headline), fix: bottom(fix?.closest('tr')), line: bottom(line)};
}"""
WITHOUT_LINE = ("overfit stalled",)
"""What is at fault is a layer of the model, made on the line of the magic itself."""
FOUND = ("found", "diverged", "list", "graph", "differs", "failing", "error", "silent", "stalled", "vanishing")


@pytest.fixture(scope="module")
def gallery(browser: Browser, server: harness.Server, root: Path) -> Iterator[Lab]:
    """A notebook with a cell for each of `CELLS`, run from top to bottom; pictures of each report are left in build/screens."""
    with harness.page_in(browser, server, root / "build/screens") as lab:
        resize(lab.page, WIDTHS[0])
        lab.open("gallery.ipynb", [SETUP, *CELLS.values()], may_stop=True)
        stand_still(lab.page)
        lab.start_all()
        lab.wait_for_each_cell(limit_s=400)
        yield lab


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
def test_the_headline_the_fix_and_the_line_are_on_the_first_screen(gallery: Lab, width: int) -> None:
    resize(gallery.page, width)
    stand_still(gallery.page)
    far: list[str] = []
    for number, name in enumerate(CELLS, start=1):
        ends: dict[str, Any] = gallery.cell(number).evaluate(ENDS)
        asked = (
            "headline",
            *(("fix",) if name.endswith(FOUND) else ()),
            *(("line",) if name.endswith(FOUND) and name not in WITHOUT_LINE else ()),
        )
        for part in asked:
            if ends.get(part) is None:
                far.append(f"{name}: no {part}")
            elif ends[part] > SCREEN:
                far.append(f"{name}: the {part} ends {ends[part]:.0f} pixels down")
    assert far == []


@pytest.mark.thorough
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_every_report(gallery: Lab, theme: str, width: int) -> None:
    gallery.theme(THEMES[theme])
    resize(gallery.page, width)
    gallery.screens.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(CELLS, start=1):
        picture = gallery.screens / f"{name.replace(' ', '_')}_{theme}_{width}.png"
        gallery.cell(number).screenshot(path=str(picture))
        assert picture.stat().st_size > 5_000, name
