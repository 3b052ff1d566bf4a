"""Which files the runs wrote to: who reads one of them again reads what the first run left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.statements import Statement

__all__ = ["Files"]


class Files:
    """Of both runs."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self._read: dict[Statement, str] = {}

    def met(self, file: Any) -> None:
        """A file that a name holds."""
        if "b" not in (mode := str(getattr(file, "mode", ""))) and any(one in mode for one in "wax+"):
            self.wrote(file)

    def wrote(self, file: Any) -> None:
        """Something is written to it."""
        if name := _name(file):
            self.written.add(name)

    def read(self, file: Any, statement: Statement | None) -> None:
        """A statement reads from it."""
        if statement is not None and (name := _name(file)):
            self._read[statement] = name

    def read_by(self, statement: Statement | None) -> str:
        """The file that a statement read; empty where it read none."""
        return self._read.get(statement, "") if statement is not None else ""


def _name(file: Any) -> str:
    name = getattr(file, "name", None)
    return os.path.realpath(name) if isinstance(name, str) else ""
