"""Maps a cell's file name to its ``In[n]`` in IPython 7, whose compiler keeps no such table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

__all__ = ["CellNumbers"]

_TABLE = "_filename_map"
"""Attribute of IPython 8's compiler; created here where it is missing."""


class CellNumbers:
    """Records the file name of each cell before it runs."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._compiler: Any = shell.compile
        self._needed = not hasattr(shell.compile, _TABLE)
        self._note = self._before_cell  # kept, as each access makes another bound method

    def install(self) -> None:
        """Start recording."""
        if self._needed:
            setattr(self._compiler, _TABLE, {})
            self._shell.events.register("pre_run_cell", self._note)

    def uninstall(self) -> None:
        """Stop recording and remove the table."""
        if self._needed:
            delattr(self._compiler, _TABLE)
            self._shell.events.unregister("pre_run_cell", self._note)

    def _before_cell(self, info: ExecutionInfo) -> None:
        if info.store_history and info.raw_cell:
            number = self._shell.execution_count
            name = self._compiler.get_code_name(info.raw_cell, info.raw_cell, number)
            getattr(self._compiler, _TABLE)[name] = number
