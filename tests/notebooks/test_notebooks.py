"""Every notebook runs from top to bottom on a real kernel of both stacks, and shows what it promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests import stacks
from tests.notebooks.runs import EXERCISES, FOLDER, NOTEBOOKS, code_cells, executed, run, verdicts
from tests.notebooks.sentences import SENTENCES, unsaid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

pytestmark = pytest.mark.kernel

WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURE = re.compile(r"base64,[A-Za-z0-9+/=]*")
LARGEST_OUTPUT = 100_000  # characters of HTML without its pictures: what GitHub and a mail still show


def shown(document: NotebookNode) -> Iterator[tuple[int, Any]]:
    """Every output that has data, by the number of its cell."""
    for number, cell in code_cells(document):
        for output in cell.outputs:
            if "data" in output:
                yield number, output.data


# An exercise runs here untouched, on the modern stack; `test_exercises.py` runs it solved, on the other one.
RUNS = {
    f"{path.relative_to(FOLDER).with_suffix('')}-{stack}": (path, stack)
    for path in NOTEBOOKS
    for stack in stacks.STACKS
    if stack == "modern" or path not in EXERCISES.values()
}


@pytest.fixture(scope="module", params=RUNS)
def document(request: pytest.FixtureRequest, kernels: None, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    path, stack = RUNS[request.param]
    folder = tmp_path_factory.mktemp("notebooks") / "copy"  # the other stack's run may write beside it at the same time
    shutil.copytree(FOLDER, folder)
    before = set(folder.rglob("*"))
    result = executed(folder / path.relative_to(FOLDER), stack)
    assert set(folder.rglob("*")) == before, "the notebook left files beside it"
    return result


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(run, marks=[pytest.mark.waits] if run.startswith("hangwatch-") else [])
        for run in RUNS
        if run.rpartition("-")[0] in SENTENCES
    ],
    indirect=True,
    scope="module",
)
def test_a_notebook_says_what_it_promises(document: NotebookNode, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["document"].rpartition("-")[0]
    assert unsaid(document, name) == ""


def test_there_is_a_tour() -> None:
    assert FOLDER / "00_tour.ipynb" in NOTEBOOKS


def test_a_cell_that_is_to_fail_fails(document: NotebookNode) -> None:
    for number, cell in code_cells(document):
        fails = any(output.output_type == "error" for output in cell.outputs)
        tags = cell.metadata.get("tags", ())
        assert fails == ("raises-exception" in tags and "once-solved" not in tags), f"cell {number}"


def test_each_check_of_an_untouched_exercise_says_what_is_missing(document: NotebookNode) -> None:
    said = verdicts(document)
    for number, sentence in enumerate(said, 1):
        task = number if number < len(said) else 1  # the last one looks at all, and begins with the first
        assert re.fullmatch(rf"○ Task {task}: [^\n]{{20,220}}[.?]", sentence), sentence


def test_no_live_widget_is_left(document: NotebookNode) -> None:
    """In a saved notebook it would say "Error displaying widget"; ``-w`` asks for one all the same."""
    asks = re.compile(r"(^|\s)(-w|--widget)\b|ipywidgets")
    asked = {number for number, cell in code_cells(document) if asks.search(cell.source)}
    assert [number for number, data in shown(document) if WIDGET in data and number not in asked] == []
    assert "widgets" not in document.metadata


def test_every_html_output_can_also_be_read_as_text(document: NotebookNode) -> None:
    assert [number for number, data in shown(document) if data.get("text/html") and not data.get("text/plain")] == []


def test_outputs_stay_small(document: NotebookNode) -> None:
    sizes = {number: len(PICTURE.sub("", data.get("text/html", ""))) for number, data in shown(document)}
    assert {number: size for number, size in sizes.items() if size > LARGEST_OUTPUT} == {}


def test_nothing_of_ours_is_written_to_stderr(document: NotebookNode) -> None:
    said = [output.text for _, cell in code_cells(document) for output in cell.outputs if output.get("name") == "stderr"]
    assert [text for text in said if "torchdebug" in text or "Traceback" in text] == []


def test_a_failing_cell_fails_the_run_and_the_stacks_are_what_they_are_called(kernels: None, tmp_path: Path) -> None:
    """The checks above rest on this."""
    from nbclient.exceptions import CellExecutionError

    source = "import IPython, ipykernel, ipywidgets\nprint(IPython.__version__, ipykernel.__version__, ipywidgets.__version__)"
    said = {}
    for stack in stacks.STACKS:
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("1 / 0")])
        with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
            run(document, tmp_path, stack)
        said[stack] = document.cells[0].outputs[0].text.split()
    assert said["colab"] == ["7.34.0", "6.17.1", "7.7.1"]
    assert [int(version.partition(".")[0]) for version in said["modern"]] >= [9, 7, 8]


def test_the_page_of_a_tour_shows_every_output_and_a_failure_is_one(root: Path, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("print(6 * 7)"), nbformat.v4.new_code_cell("raise LookupError('planted')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "short.ipynb")
    command = [sys.executable, str(root / "tools/execute_notebook.py"), str(tmp_path / "short.ipynb"), str(tmp_path / "made/short.html")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    assert "planted" in ran.stderr
    assert "WARNING" not in ran.stderr
    page = (tmp_path / "made/short.html").read_text(encoding="utf-8")
    assert "42" in page
    assert "LookupError" in page
