"""Every notebook begins in the same way: badges that lead to it, and a cell that installs without replacing torch or IPython."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.notebooks.runs import FOLDER, NOTEBOOKS, run

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

# Stands in for pip: notes what it was asked for.
PIP = "import json, os, sys\nopen(os.environ['ASKED'], 'w').write(json.dumps(sys.argv[1:]))\n"


@pytest.fixture(scope="module")
def head() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook_head", FOLDER.parent / "tools/notebook_head.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_a_title_its_badges_and_the_install_cell(head: ModuleType, path: Path) -> None:
    first, second = nbformat.read(path, as_version=4).cells[:2]
    lines = first.source.split("\n")
    assert lines[0].startswith("# ")
    assert lines[2] == head.badges(path.relative_to(FOLDER.parent).as_posix()), "run tools/notebook_head.py"
    assert second.source == head.INSTALL, "run tools/notebook_head.py"


def test_writing_the_heads_anew_changes_nothing(head: ModuleType) -> None:
    for path in NOTEBOOKS:
        before = path.read_text(encoding="utf-8")
        document = nbformat.reads(before, as_version=4)
        head.set_head(document, path.relative_to(FOLDER.parent).as_posix())
        head.set_bare(document)
        assert nbformat.writes(document) + "\n" == before, f"{path.name}: run tools/notebook_head.py"


def test_a_notebook_without_a_head_gets_one(head: ModuleType) -> None:
    document = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# A title\n\nA story."), nbformat.v4.new_code_cell("1 + 1", execution_count=3)]
    )
    head.set_head(document, "notebooks/new one.ipynb")
    head.set_bare(document)
    first, second, third = document.cells
    assert first.source == f"# A title\n\n{head.badges('notebooks/new one.ipynb')}\n\nA story."
    assert "notebooks/new%20one.ipynb" in first.source
    assert second.source == head.INSTALL
    assert (third.source, third.execution_count) == ("1 + 1", None)


def test_the_badges_of_the_readme_lead_to_the_tour(head: ModuleType) -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert all(badge in readme for badge in head.badges("notebooks/00_tour.ipynb").replace(") [!", ")\n[!").split("\n"))


@pytest.mark.kernel
@pytest.mark.parametrize("stack", ["modern", "colab"])
def test_where_it_is_missing_pip_is_bound_to_the_torch_and_ipython_that_are_there(
    head: ModuleType, kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: str
) -> None:
    (tmp_path / "torchdebug_magics.py").write_text("raise ImportError")
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"])))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    versions = "from importlib.metadata import version\nprint(version('torch'), version('ipython'))"
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(head.INSTALL), nbformat.v4.new_code_cell(versions)])
    outputs = run(document, tmp_path, stack).cells[1].outputs  # a print may come in parts
    torch, ipython = "".join(one.text for one in outputs if one.get("name") == "stdout").split()
    command, *asked = json.loads((tmp_path / "asked").read_text())
    assert command == "install"
    assert set(asked) == {"-q", "torchdebug-magics", f"torch=={torch}", f"ipython=={ipython}"}
