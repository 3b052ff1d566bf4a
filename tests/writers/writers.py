"""The table: ways in which the cells of a PyTorch notebook write to disk or reach the outside world."""

from __future__ import annotations

import importlib.util

from tests.writers import rows_files, rows_folders, rows_handles, rows_outside

WRITERS = (*rows_files.ROWS, *rows_folders.ROWS, *rows_handles.ROWS, *rows_outside.ROWS)


def installed(name: str) -> bool:
    """Whether the module that a row needs can be imported here; true for the empty name."""
    return not name or importlib.util.find_spec(name) is not None
