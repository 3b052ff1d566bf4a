"""Every exercise can be solved as its notebook says: with the solutions in the places of the answers, each check passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.notebooks.runs import EXERCISES, answers, code_cells, run, solutions, verdicts

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.kernel


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
