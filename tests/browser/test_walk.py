"""The tour as a stranger reads it, in the light theme and in the dark: in JupyterLab, and on nbconvert's page."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser import lab as harness
from tests.browser.reading import OUTPUTS, complaints, stand_still

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

THEMES = {"light": harness.LIGHT, "dark": harness.DARK}
WIDTHS = (1100, 700)
HEIGHT = 16_000  # the whole tour: JupyterLab draws no cell that is out of sight
MAGICS = ("%torchdebug", "%shapes", "%%memtrace", "%%nanhunt", "%%deterministic")


@pytest.fixture(scope="module")
def toured(browser: Browser, server: harness.Server, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab with the tour, run from top to bottom."""
    shutil.copy(root / "notebooks/00_tour.ipynb", server.folder)
    with harness.page_in(browser, server, tmp_path_factory.mktemp("walk")) as lab:
        lab.page.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
        lab.open("00_tour.ipynb")
        stand_still(lab.page)
        lab.start_all()
        lab.wait_for_each_cell()
        lab.save()
        yield lab


@pytest.fixture(scope="module")
def saved(toured: Lab) -> nbformat.NotebookNode:
    """The tour as it is in the file, with what it showed."""
    return nbformat.read(toured.file, as_version=4)


def complained(page: Page) -> list[str]:
    """What reads badly at any width; a table may have to be scrolled."""
    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        found += [f"{width} wide: {complaint}" for complaint in complaints(page, all_in_sight=False)]
    return found


def errors(lab: Lab) -> list[str]:
    """In the console; the badges of the first cell are out of reach, as all else that is not on this machine."""
    return [error for error in lab.console_errors if "ERR_NAME_NOT_RESOLVED" not in error]


@pytest.mark.parametrize("theme", THEMES)
def test_every_output_reads_well_in_jupyterlab(toured: Lab, theme: str) -> None:
    toured.theme(THEMES[theme])
    toured.page.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
    outputs = toured.page.locator(OUTPUTS)
    assert outputs.count() >= len(MAGICS)
    for number, output in enumerate(outputs.all()):
        if output.is_visible():  # one that was taken back has no height
            output.screenshot(path=toured.screens / f"lab_{theme}_{number:02}.png")
    assert complained(toured.page) == []
    assert errors(toured) == []


@pytest.mark.parametrize("theme", THEMES)
def test_every_output_reads_well_on_the_page_that_nbconvert_writes(
    browser: Browser, saved: nbformat.NotebookNode, theme: str, tmp_path: Path
) -> None:
    html, _ = HTMLExporter(embed_images=True, theme=theme).from_notebook_node(saved)
    (tmp_path / "tour.html").write_text(html, encoding="utf-8")
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": HEIGHT})
    try:
        page.goto((tmp_path / "tour.html").as_uri(), wait_until="domcontentloaded")
        assert page.locator(OUTPUTS).count() >= len(MAGICS)
        page.screenshot(path=tmp_path / f"page_{theme}.png", full_page=True)
        assert complained(page) == []
    finally:
        page.close()


FAULTS = {
    "faint": "<p style='color:#999;background:#fff'>hard to see</p>",
    "faint in a layer": "<p style='color:#000;background:#fff;opacity:.4'>hard to see</p>",
    "cut off": "<div style='width:90px;overflow:hidden;white-space:nowrap'>a sentence that is longer than its box</div>",
    "outside": "<div style='margin-left:-40px'>begins too far to the left</div>",
    "without words": "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw=' width=9 height=9>",
    "not shown": "<img src='nowhere.png' alt='a curve' width=9 height=9>",
    "dead widget": "<p style='color:#000;background:#fff'>Error displaying widget</p>",
    "must be scrolled": "<div style='overflow:auto;width:90px;white-space:nowrap'>a sentence that is longer than its box</div>",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_reads_badly_is_complained_of(browser: Browser, fault: str) -> None:
    page = browser.new_page()
    try:
        page.set_content(f"<div class='{OUTPUTS.removeprefix('.')}' style='margin-left:60px'>{FAULTS[fault]}</div>")
        seen = complaints(page, all_in_sight=True)
        assert seen, "nothing was seen"
        word = fault.removesuffix(" in a layer")
        assert any(word in complaint.what for complaint in seen), seen
        page.set_content(f"<div class='{OUTPUTS.removeprefix('.')}'><p style='color:#595959;background:#fff'>easy to read</p></div>")
        assert complaints(page, all_in_sight=True) == []
    finally:
        page.close()
