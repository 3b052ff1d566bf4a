"""How every notebook begins: its badges, and a cell that installs. Run it to write both into all of them anew: notebook_head.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import nbformat

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"

REPOSITORY = "torchdebug/torchdebug_magics"
BRANCH = "main"

# In Colab torch and IPython are part of the running kernel: replacing one breaks it. So pip is bound to the versions that are there, and
# would rather fail than replace them.
INSTALL = """\
try:
    import torchdebug_magics
except ImportError:
    from importlib.metadata import distributions

    keep = {f"{part.name}=={part.version}" for part in distributions() if part.name in ("torch", "ipython")}
    %pip install -q torchdebug-magics {" ".join(keep)}"""


def badges(notebook: str) -> str:
    """The line of badges that open a notebook; `notebook` is its path in the repository."""
    path = quote(notebook)
    colab = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/{path}"
    binder = f"https://mybinder.org/v2/gh/{REPOSITORY}/{BRANCH}?urlpath=lab/tree/{path}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def set_head(document: NotebookNode, notebook: str) -> None:
    """Put the badges under the title, and the install cell behind the first text; what was there of either is replaced."""
    first, second = document.cells[:2]
    title, *text = first.source.split("\n")
    words = "\n".join(line for line in text if not line.startswith("[![Open in ")).strip("\n")
    first.source = f"{title}\n\n{badges(notebook)}\n\n{words}"
    if second.cell_type == "code" and "torchdebug-magics" in second.source:
        second.source = INSTALL
    else:
        document.cells.insert(1, nbformat.v4.new_code_cell(INSTALL, id="install"))


def set_bare(document: NotebookNode) -> None:
    """Without outputs, counts and what a front end notes for itself, so that a change in git is a change in the notebook."""
    document.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}
    )
    for cell in document.cells:
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def main() -> int:
    """Rewrite those that differ, and name them."""
    for path in sorted(NOTEBOOKS.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        before = path.read_text(encoding="utf-8")
        document = nbformat.reads(before, as_version=4)
        set_head(document, path.relative_to(ROOT).as_posix())
        set_bare(document)
        after = nbformat.writes(document) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
