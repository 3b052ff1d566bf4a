"""Cells of which the last one fails, and what `%torchdebug` says after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def after_error(shell: InteractiveShell, *cells: str) -> Any:
    """The report on the error of the last cell; the others must run."""
    from IPython.utils.capture import capture_output

    with capture_output():
        for cell in cells[:-1]:
            assert shell.run_cell(cell, store_history=True).success, cell
        assert not shell.run_cell(cells[-1], store_history=True).success
        shell.run_cell("%torchdebug -o report", store_history=True)
    return shell.user_ns["report"]
