"""Which files the runs wrote to: who reads one of them again reads what the first run left."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.lines.line_statements import Statement
    from torchdebug_magics.instruments.deterministic.origin.lines.line_steps import Step

__all__ = ["Files"]


class Files:
    """Of all runs."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self._read: dict[Step, str] = {}
        self._read_by: dict[Statement, str] = {}
        self._writers: defaultdict[str, list[Step]] = defaultdict(list)

    def met(self, file: Any) -> None:
        """A file that a name holds."""
        if "b" not in (mode := str(getattr(file, "mode", ""))) and any(one in mode for one in "wax+"):
            self.wrote(file)

    def wrote(self, file: Any, step: Step | None = None) -> None:
        """Something is written to it, by a line where that is known; it goes by its name where no Python object stands for it."""
        if name := _name(file):
            self.written.add(name)
            if step is not None:
                self._writers[name].append(step)

    def read(self, file: Any, step: Step) -> None:
        """A line reads from it."""
        if name := _name(file):
            self._read[step] = name
            if step.statement is not None:
                self._read_by[step.statement] = name

    def read_by(self, statement: Statement | None) -> str:
        """The file that a statement read; empty where it read none."""
        return self._read_by.get(statement, "") if statement is not None else ""

    def writer(self, lines: list[Step], steps: frozenset[Step]) -> Step | None:
        """The last of a run's `steps` that wrote the file which the lines of a statement read, before they did."""
        path = next((self._read[one] for one in lines if one in self._read), "")
        before = [one for one in self._writers.get(path, ()) if one in steps and one.number < lines[0].number]
        return before[-1] if before else None


def _name(file: Any) -> str:
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", None)
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else ""
