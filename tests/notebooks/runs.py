"""Running a notebook on a kernel of one of the stacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.client import KernelClient
    from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
EXERCISES = {path.stem: path for path in sorted((FOLDER / "exercises").glob("*.ipynb"))}
SOLUTION = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECK = re.compile(r"^check\(\d*\)$", re.MULTILINE)
NOTEBOOKS = sorted(path for path in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


class Client(NotebookClient):
    """Lets cells ask, as every front end does, so that a debugger's prompt waits for an answer; nobody gives one here."""

    async def async_start_new_kernel_client(self) -> KernelClient:
        client = await super().async_start_new_kernel_client()
        client.allow_stdin = True
        return client


def executed(path: Path, kernel: str) -> NotebookNode:
    """The notebook after a run; a cell that fails and is not tagged ``raises-exception`` is an error."""
    return run(nbformat.read(path, as_version=4), path.parent, kernel)


def run(document: NotebookNode, folder: Path, kernel: str) -> NotebookNode:
    where = {"metadata": {"path": str(folder)}}
    Client(document, timeout=150, kernel_name=kernel, store_widget_state=False, resources=where).execute()
    return document


def code_cells(document: NotebookNode) -> Iterator[tuple[int, Any]]:
    for number, cell in enumerate(document.cells):
        if cell.cell_type == "code":
            yield number, cell


def verdicts(document: NotebookNode) -> list[str]:
    """What each check said, in the order of the cells."""
    checks = [cell for _, cell in code_cells(document) if CHECK.search(cell.source)]
    return [next(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result") for cell in checks]


def answers(document: NotebookNode) -> list[Any]:
    """The cells that the learner writes."""
    return [cell for _, cell in code_cells(document) if "answer" in cell.metadata.get("tags", ())]


def solutions(document: NotebookNode) -> list[str]:
    """The code of all that is behind ``<details>``, one piece for each answer."""
    folded = [cell.source for cell in document.cells if cell.cell_type == "markdown" and cell.source.startswith("<details>")]
    return [code.rstrip() for text in folded for code in SOLUTION.findall(text)]


def solutions_of(stem: str) -> list[str]:
    return solutions(nbformat.read(EXERCISES[stem], as_version=4))
