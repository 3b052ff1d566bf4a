"""Notebooks of several cells, run by a shell: each fault is named with its lines, and healthy ones are left in peace."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from IPython.utils.capture import capture_output

from tests.doors import in_process_shell
from tests.unit.instruments.autograd.planted_notebooks import FAULTY, HEALTHY, HELPER, MARKED, Notebook

if TYPE_CHECKING:
    from collections.abc import Iterator

_FIELDS = {"location": "location", "saved": "saved_at", "first": "first_backward_at", "shared": "shared_from"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which the file is that some notebooks import."""
    (tmp_path / "autograd_helper.py").write_text(HELPER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("autograd_helper", None)


def ran(cells: tuple[str, ...]) -> dict[str, Any]:
    """The names of the notebook at its end."""
    with in_process_shell() as shell, capture_output():
        for cell in cells:
            assert shell.run_cell(cell, store_history=True).error_before_exec is None
        return dict(shell.user_ns)


def places(notebook: Notebook, field: str) -> set[tuple[int | str, int]]:
    """(In[n] or file, line) of the marked lines; those of the file only where no cell has one."""
    texts: list[tuple[int | str, str]] = [*enumerate(notebook.all_cells, 1)]
    found = {(name, line) for name, text in texts for line, code in enumerate(text.splitlines(), 1) if is_marked(code, field)}
    in_file = {("autograd_helper.py", line) for line, code in enumerate(HELPER.splitlines(), 1) if is_marked(code, field)}
    return found or (in_file if any("autograd_helper" in cell for cell in notebook.cells) else set())


def is_marked(code: str, field: str) -> bool:
    match = MARKED.search(code)
    return match is not None and field in match["fields"].split(", ")


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", FAULTY, ids=[one.name for one in FAULTY])
def test_the_fault_of_a_notebook_is_named(notebook: Notebook) -> None:
    report = ran(notebook.all_cells)["r"]
    finding = report.finding
    if not notebook.kinds:
        assert finding is None
        return
    assert finding is not None, report.verdict
    assert finding.kind in notebook.kinds
    for mark, name in _FIELDS.items():
        place, right = getattr(finding, name), places(notebook, mark)
        if right:
            assert place is not None, name
            assert (place.cell or Path(place.file).name, place.line) in right, name
    for values, name in (
        (notebook.ops, "op"), (notebook.writer_ops, "writer_op"), (notebook.tensors, "tensor"), (notebook.modules, "module"),
    ):  # fmt: skip
        assert not values or getattr(finding, name) in values
    assert not notebook.parameters or set(finding.parameters) == set(notebook.parameters)
    assert re.search(notebook.fix, finding.fix)
    assert finding.fix
    assert len([finding for finding in report.findings if finding.stage != "remark"]) == 1
    assert [one for one in report.problems if "read from the error" not in one] == []


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", HEALTHY, ids=[one.name for one in HEALTHY])
def test_nothing_is_found_in_a_healthy_notebook(notebook: Notebook) -> None:
    report = ran(notebook.all_cells).get("r")
    assert report is None or [(one.kind, one.headline) for one in report.findings] == []
    assert report is None or report.problems == ()


def test_a_loss_that_misses_a_branch() -> None:
    cells = (
        "import torch.nn as nn, torch\n",
        """\
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) + self.b(x).detach()

two = Two()
loss = two(torch.randn(2, 4)).sum()
""",
        "%autograd loss -o r",
    )
    report = ran(cells)["r"]
    assert {one.name: one.reached for one in report.reaches} == {"a.weight": True, "a.bias": True, "b.weight": False, "b.bias": False}
    assert [(one.op, one.location.line) for one in report.cuts] == [("detach", 7)]
