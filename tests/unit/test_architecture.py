"""Who may import whom: the contracts of pyproject.toml hold, each of them can fail, and every module falls under one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import grimp
import networkx as nx
import pytest

if TYPE_CHECKING:
    from pathlib import Path

# What the folder of the package may hold (CONTRIBUTING.md has it): a new name belongs in there, and into a contract, first.
LAYOUT = {
    "__init__",
    "__main__",
    "catalog",
    "errors",
    "exercises",
    "fixes",
    "format",
    "hangwatch",
    "html",
    "instrument",
    "instruments",
    "jupyter",
    "machine",
    "memory",
    "probing",
    "ranks",
    "report",
    "run",
    "session",
}

MOST_LINES, MOST_MODULES = 460, 400

# Contract -> imports that break it, each in a module of that place.
VIOLATIONS = {
    "instruments-independent": [("instruments/other/view.py", "import torchdebug_magics.instruments.nanhunt.report")],
    "notebook-only-in-jupyter": [
        ("probing/planted.py", "import IPython"),
        ("instruments/other/view.py", "import ipywidgets"),
        ("html/planted.py", "import torchdebug_magics.jupyter"),
        ("session.py", "def late():\n    import IPython.display"),
        ("fixes.py", "import IPython"),
        ("machine/planted.py", "import IPython"),
        ("ranks/planted.py", "import IPython"),
        ("run/planted.py", "import torchdebug_magics.jupyter"),
        ("__main__.py", "import IPython"),
    ],
    "reports-pure": [
        ("instruments/other/report.py", "import torch"),
        ("report.py", "import numpy"),
        ("format.py", "import torchdebug_magics.html"),
        ("instruments/other/report.py", "from torchdebug_magics.probing import planted"),
        ("ranks/merging.py", "import torch"),
    ],
    "views-without-torch": [
        ("instruments/other/view.py", "import torch"),
        ("html/planted.py", "import torchdebug_magics.probing"),
        ("instruments/other/view.py", "import torchdebug_magics.instruments.other.probe"),
        ("ranks/view.py", "import torchdebug_magics.probing"),
    ],
    "machine-without-torch": [
        ("machine/planted.py", "import torch"),
        ("machine/limits.py", "def late():\n    import torchdebug_magics.probing.safety"),
    ],
    "spine-bare": [("session.py", "import torch"), ("errors.py", "import torchdebug_magics.html"), ("instrument.py", "import matplotlib")],
    "probing-shows-nothing": [
        ("probing/planted.py", "import torchdebug_magics.html"),
        ("instruments/other/probe.py", "import torchdebug_magics.html"),
        ("instruments/other/engine.py", "import matplotlib"),
    ],
    "rows-light": [
        ("instruments/other/__init__.py", "import torch"),
        ("instruments/other/__init__.py", "from torchdebug_magics.instruments.other import probe"),
        ("__init__.py", "def late():\n    import torch"),
    ],
    "layers": [
        ("probing/planted.py", "import torchdebug_magics.memory"),
        ("probing/planted.py", "import torchdebug_magics.ranks.agent"),
        ("memory/planted.py", "import torchdebug_magics.instruments.memtrace.report"),
        ("machine/planted.py", "def late():\n    import torchdebug_magics.probing.safety"),
    ],
    "exercises-stand-alone": [("exercises/checking.py", "import IPython"), ("exercises/nan.py", "import torchdebug_magics.probing.safety")],
    "exercises-are-leaves": [
        ("__init__.py", "def late():\n    import torchdebug_magics.exercises.nan"),
        ("jupyter/planted.py", "import torchdebug_magics.exercises"),
    ],
    "jupyter-without-torch": [
        ("jupyter/planted.py", "import torch"),
        ("jupyter/planted.py", "import torchdebug_magics.probing"),
        ("jupyter/planted.py", "import torchdebug_magics.instruments.nanhunt.report"),
    ],
}

# One process for all the violations: the import of the linter is dearer than its work.
CHECK = """
import json, os, sys
from importlinter.application import use_cases
from importlinter.configuration import configure
configure()
answers = []
for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    options = use_cases.read_user_options("pyproject.toml")
    use_cases._register_contract_types(options)
    report = use_cases.create_report(options, cache_dir=None)
    answers.append({contract.name: check.kept for contract, check in report.get_contracts_and_checks()})
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdebug_magics"]:
        del sys.modules[name]
    sys.path.remove(folder)
print(json.dumps(answers))
"""


def contracts(root: Path) -> dict[str, str]:
    """The name of each contract by its id."""
    with (root / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    return {contract["id"]: contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]}


def kept(folders: list[Path]) -> list[dict[str, bool]]:
    """Whether each contract, by its name, is kept by the package in each of the folders."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", CHECK, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    answers: list[dict[str, bool]] = json.loads(ran.stdout.splitlines()[-1])
    return answers


def planted(root: Path, folder: Path, place: str, code: str) -> Path:
    """A copy of the package with a second instrument, and with `code` at the end of one module."""
    package = folder / "torchdebug_magics"
    shutil.copytree(root / "torchdebug_magics", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", folder)
    for path in ("instruments/other/__init__.py", "instruments/other/probe.py", "probing/planted.py", place):
        (package / path).parent.mkdir(exist_ok=True)
        (package / path).touch()
    with (package / place).open("a", encoding="utf-8") as module:
        module.write(f"\n{code}\n")
    return folder


def test_the_package_keeps_every_contract(root: Path) -> None:
    (answer,) = kept([root])
    assert set(answer) == set(contracts(root).values())
    assert [name for name, is_kept in answer.items() if not is_kept] == []


def test_each_contract_can_fail(root: Path, tmp_path: Path) -> None:
    names = contracts(root)
    assert set(VIOLATIONS) == set(names)
    cases = [(contract, place, code) for contract, imports in VIOLATIONS.items() for place, code in imports]
    folders = []
    for number, (_, place, code) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        folders.append(planted(root, tmp_path / str(number), place, code))
    unseen = [case for case, answer in zip(cases, kept(folders), strict=True) if answer[names[case[0]]]]
    assert unseen == []


def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    """Imports for types count."""
    graph = grimp.build_graph("torchdebug_magics", cache_dir=None, exclude_type_checking_imports=False)
    imports = nx.DiGraph()
    packages = {module for module in graph.modules if (root.joinpath(*module.split(".")) / "__init__.py").exists()}
    modules = graph.modules - packages  # the `__init__` of the package names its instruments for type checkers
    imports.add_edges_from((module, one) for module in modules for one in graph.find_modules_directly_imported_by(module) if one in modules)
    circles = [sorted(circle) for circle in nx.strongly_connected_components(imports) if len(circle) > 1]
    assert circles == []


def test_every_module_is_a_chapter(root: Path) -> None:
    """At most about 450 lines, and no more than 400 modules."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "torchdebug_magics").rglob("*.py")}
    assert [f"{path.relative_to(root)}: {size}" for path, size in sizes.items() if size > MOST_LINES] == []
    assert len(sizes) <= MOST_MODULES


def test_every_module_has_its_place_in_the_layout(root: Path) -> None:
    here = {path.stem for path in (root / "torchdebug_magics").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here <= LAYOUT
    with (root / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    sources = {source for contract in contracts for source in contract.get("source_modules", ())}
    assert {name for name in here - {"__init__"} if f"torchdebug_magics.{name}" not in sources} == set()


def test_every_instrument_has_the_same_parts(root: Path) -> None:
    folders = [path for path in (root / "torchdebug_magics/instruments").iterdir() if (path / "__init__.py").exists()]
    for folder in folders:
        parts = {path.stem for path in folder.glob("*.py")}
        assert parts >= {"__init__", "report", "view"}, f"{folder.name} has {sorted(parts)}"
        assert parts & {"probe", "examine"}, f"{folder.name} has {sorted(parts)}: it neither opens a session nor looks at once"


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc", "manager", "settings"])
def test_no_module_has_a_name_that_says_nothing(root: Path, name: str) -> None:
    assert list((root / "torchdebug_magics").rglob(f"{name}.py")) == []


def test_notebooks_are_stored_without_outputs(root: Path) -> None:
    notebooks = [path for path in (root / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), f"{path}: run tools/notebook_head.py"
