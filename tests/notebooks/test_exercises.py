"""Every exercise can be solved as its notebook says: with the solutions in the places of the answers, each check passes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests.notebooks.runs import FOLDER, NOTEBOOKS, code_cells, run, verdicts

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

pytestmark = pytest.mark.kernel

EXERCISES = {path.stem: path for path in NOTEBOOKS if path.parent == FOLDER / "exercises"}
SOLUTION = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

def answers(document: NotebookNode) -> list[Any]:
    """The cells that the learner writes."""
    return [cell for _, cell in code_cells(document) if "answer" in cell.metadata.get("tags", ())]


def solutions(document: NotebookNode) -> list[str]:
    """The code of all that is behind ``<details>``, one piece for each answer."""
    folded = [cell.source for cell in document.cells if cell.cell_type == "markdown" and cell.source.startswith("<details>")]
    return [code.rstrip() for text in folded for code in SOLUTION.findall(text)]


@pytest.fixture(params=EXERCISES)
def exercise(request: pytest.FixtureRequest) -> Path:
    return EXERCISES[request.param]


def test_with_the_solutions_each_check_passes(kernels: None, exercise: Path) -> None:
    document = nbformat.read(exercise, as_version=4)
    mine, theirs = answers(document), solutions(document)
    assert len(mine) == len(theirs)
    for cell, solution in zip(mine, theirs, strict=True):
        assert cell.source != solution
        cell.source = solution
    said = verdicts(run(document, exercise.parent, "colab"))
    assert [sentence for sentence in said if not sentence.startswith("✓")] == []
    for number, cell in code_cells(document):
        tags = cell.metadata.get("tags", ())
        fails = any(output.output_type == "error" for output in cell.outputs)
        assert fails or "once-solved" not in tags, f"cell {number}"
