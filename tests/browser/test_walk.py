"""The tour as a stranger reads it, in the light theme and in the dark: in JupyterLab, on nbconvert's page, and when it is not trusted."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser import lab as harness
from tests.browser.reading import OUTPUTS, complaints, resize, stand_still
from tests.notebooks.runs import code_cells
from tests.notebooks.sentences import unsaid
from torchdebug_magics import catalog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from tests.browser.lab import Lab

pytestmark = pytest.mark.browser

THEMES = {"light": harness.LIGHT, "dark": harness.DARK}
WIDTHS = (1300, 1100, 700)
WIDE_ENOUGH = 1300
"""For every table of the tour."""
BADGES = ("https://colab.research.google.com/assets/colab-badge.svg", "https://mybinder.org/badge_logo.svg")
MAGICS = ("%torchdebug", "%%torchdebug", "%shapes", "%%memtrace", "%%nanhunt", "%%deterministic", "%%gradwatch")


@pytest.fixture(scope="module")
def toured(browser: Browser, server: harness.Server, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab with the tour, run from top to bottom."""
    shutil.copy(root / "notebooks/00_tour.ipynb", server.folder)
    with harness.page_in(browser, server, tmp_path_factory.mktemp("walk")) as lab:
        resize(lab.page, WIDTHS[0])
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


def complained(page: Page, widths: Sequence[int] = WIDTHS) -> list[str]:
    """What reads badly at any of the widths; on a narrow page, a table may have to be scrolled."""
    found = []
    for width in widths:
        resize(page, width)
        found += [f"{width} wide: {complaint}" for complaint in complaints(page, all_in_sight=width >= WIDE_ENOUGH)]
    return found


def errors(lab: Lab) -> list[str]:
    """In the console; the badges of the first cell are out of reach, and nothing else is asked for from outside."""
    return [error for error in lab.console_errors if not any(badge in error for badge in BADGES)]


@pytest.mark.parametrize("theme", THEMES)
def test_every_output_reads_well_in_jupyterlab(toured: Lab, theme: str) -> None:
    toured.theme(THEMES[theme])
    resize(toured.page, WIDTHS[0])
    assert toured.page.locator(OUTPUTS).count() >= len(MAGICS)
    assert complained(toured.page, WIDTHS if theme == "light" else WIDTHS[:1]) == []  # where things stand is the same in the dark
    assert errors(toured) == []


def test_the_tour_says_what_it_promises(saved: nbformat.NotebookNode) -> None:
    assert unsaid(saved, "00_tour") == ""


def test_every_magic_is_listed_and_the_machine_described(toured: Lab, saved: nbformat.NotebookNode) -> None:
    said = toured.text([cell.source for _, cell in code_cells(saved)].index("%torchdebug"))
    for row in catalog.instruments():
        assert row.magic in said
        assert row.summary.replace("`", "") in said  # code is told by its letters
    for word in ("python", "torch", "IPython", "ipykernel", "ipywidgets", "memory"):
        assert word.lower() in said.lower(), word


# Of each report: the line that was run, the text in the largest letters, how far it stands below the cell, and how many such there are.
LARGEST = """(outputs) => {
    const cells = [...document.querySelectorAll('.jp-CodeCell')].map(cell => [cell, cell.querySelector('.cm-line').innerText]);
    return cells.filter(([, line]) => line.startsWith('%') && !line.startsWith('%load_ext')).map(([cell, line]) => {
        const shown = [...cell.querySelectorAll(outputs)].filter(output => output.offsetHeight);
        const report = shown.find(output => output.dataset.mimeType === 'text/html');
        const parts = [...report.querySelectorAll('p, span, td, th, code, div')].filter(part => part.innerText?.trim());
        const size = part => parseFloat(getComputedStyle(part).fontSize);
        const own = parts.filter(part => [...part.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim()));
        const most = Math.max(...own.map(size)), largest = own.filter(part => size(part) === most && part.tagName !== 'CODE');
        const below = largest[0].getBoundingClientRect().top - shown[0].getBoundingClientRect().top;
        return [line, largest[0].innerText, below, largest.length];
    });
}"""
ABOVE = 250
"""Pixels above a verdict: the lines of the user's that led to it."""


@pytest.mark.thorough
def test_the_verdict_is_the_first_thing_seen(toured: Lab, saved: nbformat.NotebookNode) -> None:
    resize(toured.page, WIDTHS[0])
    seen = toured.page.evaluate(LARGEST, OUTPUTS)
    cells = [cell for cell in saved.cells if cell.source.startswith(MAGICS)]
    assert len(seen) == len(cells)
    for (line, verdict, below, many), cell in zip(seen, cells, strict=True):
        assert many == 1, f"{line}: {many} texts are as large"
        reports = (output.data["text/plain"] for output in cell.outputs if "text/html" in output.get("data", ()))
        said = " ".join(next(filter(None, reports)).replace("`", "").split())
        assert said.startswith(f"[{said[1:].partition(']')[0]}] {verdict}"), f"{line}: {verdict}"
        assert below < ABOVE, f"{line}: the verdict stands {below} pixels below the cell"


@pytest.mark.thorough
@pytest.mark.parametrize("theme", THEMES)
def test_every_output_reads_well_on_the_page_that_nbconvert_writes(
    browser: Browser, saved: nbformat.NotebookNode, theme: str, tmp_path: Path
) -> None:
    html, _ = HTMLExporter(embed_images=True, theme=theme).from_notebook_node(saved)
    (tmp_path / "tour.html").write_text(html, encoding="utf-8")
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 1000})
    try:
        page.goto((tmp_path / "tour.html").as_uri(), wait_until="domcontentloaded")
        assert page.locator(OUTPUTS).count() >= len(MAGICS)
        assert complained(page) == []
    finally:
        page.close()


@pytest.mark.thorough
def test_every_output_reads_well_where_the_notebook_is_not_trusted(lab: Lab, saved: nbformat.NotebookNode) -> None:
    for cell in saved.cells:
        for output in cell.get("outputs", ()):
            if "text/html" in output.get("data", ()):
                output.metadata["changed"] = "elsewhere"  # as by someone else: the signature no longer holds
    lab.server.folder.joinpath("untrusted_tour.ipynb").write_text(json.dumps(saved))
    resize(lab.page, WIDTHS[0])
    lab.open("untrusted_tour.ipynb")
    stand_still(lab.page)
    reports = sum("text/html" in output.get("data", ()) for cell in saved.cells for output in cell.get("outputs", ()))
    assert reports >= len(MAGICS)
    untrusted = "[...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.trusted === false).length"
    lab.page.wait_for_function(f"reports => {untrusted} >= reports", arg=reports)
    for name in THEMES.values():
        lab.theme(name)
        resize(lab.page, WIDTHS[0])
        assert complained(lab.page) == []
    assert errors(lab) == []


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


@pytest.mark.thorough
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
