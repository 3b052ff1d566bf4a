"""Execute a notebook on a real kernel and write a page that shows every output: execute_notebook.py NOTEBOOK PAGE."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter


def execute(notebook: Path, page: Path) -> None:
    """Run every cell in `notebook`; write the page also when a cell fails, then let the error pass."""
    document = nbformat.read(notebook, as_version=4)
    page.parent.mkdir(parents=True, exist_ok=True)
    # No widget state is stored: what a reader sees later must not hang on a live widget.
    client = NotebookClient(document, timeout=600, store_widget_state=False, resources={"metadata": {"path": str(notebook.parent)}})
    # A kernel warns that it talks over TCP; it does so within this machine, and the reader waits for the tour.
    client.extra_arguments = ["--IPKernelApp.log_level=ERROR"]
    try:
        client.execute()
    finally:
        html, _ = HTMLExporter(embed_images=True).from_notebook_node(document, {"metadata": {"name": notebook.stem}})
        page.write_text(html, encoding="utf-8")


def main() -> int:
    """Run, and say in a few lines how it went."""
    if len(sys.argv) != len(("this", "notebook", "page")):
        sys.exit(__doc__)
    notebook, page = Path(sys.argv[1]), Path(sys.argv[2])
    if not notebook.exists():
        sys.exit(f"there is no {notebook}")
    start = time.monotonic()
    try:
        execute(notebook, page)
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        print(f"{notebook} failed; what it showed until then is in {page}", file=sys.stderr)
        return 1
    print(f"{notebook} ran in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
