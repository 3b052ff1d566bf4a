"""What one run of the user's lines leaves: each line with what its names held before and after, and whom it called."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

from torchdebug_magics.instruments.deterministic.origin.line_statements import Statement

Place: TypeAlias = tuple[Any, ...]
"""Where a value is kept: a variable of an activation, a name of a namespace, an attribute of an object."""


class Held(NamedTuple):
    """What a name held at one moment."""

    place: Place
    digest: int


class Source(NamedTuple):
    """Something that was asked for a value which is different each time."""

    name: str
    cause: str
    line: int
    distance: int
    """0 where the user's own line asked, more the further inside a library it was."""


@dataclass(eq=False)
class Activation:
    """One call of a function of the user's; a generator has one for all its resumptions."""

    code: CodeType
    thread: int
    """0 is the thread that ran the body; others in the order in which they were first seen."""
    steps: list[Step] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        """The same in both runs, though a cell may be compiled anew."""
        return self.code.co_filename, self.code.co_name, self.code.co_firstlineno


@dataclass(eq=False)
class Call:
    """What the user's code did between being entered and being left."""

    activation: Activation
    caller: Step | None
    entered: int
    """The number of its first step in the activation."""
    left: int = -1
    """The number after its last one."""
    returned: int | None = None

    def last(self) -> Step | None:
        """The line that returned."""
        steps = self.activation.steps
        end = len(steps) if self.left < 0 else self.left
        return steps[end - 1] if end > self.entered else None

    def steps(self) -> list[Step]:
        """All its lines, in order."""
        return self.activation.steps[self.entered : None if self.left < 0 else self.left]


@dataclass(eq=False)
class Step:
    """One line, run once."""

    __slots__ = ("activation", "after", "before", "call", "calls", "inside", "line", "number", "place", "sources", "statement")

    activation: Activation
    call: Call
    number: int
    """Its place in the order of all threads' lines."""
    place: int
    """Its place in the activation."""
    line: int
    statement: Statement | None
    before: dict[str, Held]
    after: dict[str, Held]
    inside: dict[str, dict[Place, int]]
    """Attributes of the user's objects that a name reaches through containers."""
    calls: list[Call]
    sources: list[Source]

    def whole(self) -> list[Step]:
        """All lines of the statement, one after the other, up to this one."""
        statement, steps = self.statement, self.activation.steps
        if statement is None or statement.first == statement.last:
            return [self]
        found = [self]
        for step in reversed(steps[: self.place]):
            if step.statement is not statement or step.call is not self.call:
                break
            found.insert(0, step)
        return found


@dataclass(eq=False)
class Run:
    """In order; calls that nobody of the user's asked for are the roots, such as a cell's statements and a thread's function."""

    roots: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stopped: Step | None = None
    """The line at which the run was ended; None where it came to its end."""
    is_whole: bool = True

    def below(self, calls: list[Call]) -> Iterator[Step]:
        """Every line of these calls and of what they called."""
        todo = list(calls)
        while todo:
            for step in todo.pop().steps():
                yield step
                todo += step.calls


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
