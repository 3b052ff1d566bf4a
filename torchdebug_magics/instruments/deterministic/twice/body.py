"""What is run a second time: the body of a cell, or a function."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torchdebug_magics.probing.written import called_from, writes_of

__all__ = ["Body", "FunctionBody"]


class Body(Protocol):
    """Code that may run any number of times."""

    @property
    def namespace(self) -> dict[str, Any]:
        """Its global names."""

    @property
    def hidden(self) -> frozenset[str]:
        """Names in it that are not the user's."""

    @property
    def roots(self) -> Sequence[object]:
        """What else it can reach."""

    @property
    def variables(self) -> Mapping[str, object]:
        """What its code names outside itself, as it is now."""

    @property
    def statements(self) -> Sequence[ast.stmt]:
        """Its source, where that is known."""

    @property
    def file(self) -> str:
        """The name that its source goes by."""

    @property
    def refusal(self) -> str:
        """Why it cannot be run a second time, or nothing."""

    def left(self) -> Mapping[str, object]:
        """What a run has left to the user, by name."""

    def run(self) -> None:
        """Once more. What it raises is raised; what it prints is not seen."""


class FunctionBody:
    """A call of a function without arguments."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.namespace: dict[str, Any] = {}
        self.hidden: frozenset[str] = frozenset()
        self.roots = (function,)
        self.variables = dict(_named_by(function))
        self.statements: tuple[ast.stmt, ...] = ()
        self.file = ""
        self.refusal = ""
        self._function = function
        self._given: object = None

    def left(self) -> Mapping[str, object]:
        """What it gave, and its variables."""
        return {"the result": self._given, **self.variables}

    def run(self) -> None:
        """Call it."""
        self._given = self._function()


def _named_by(function: object) -> Iterator[tuple[str, object]]:
    """Globals and closed-over variables that a function of the user's, and those that it calls, load."""
    for one in called_from(getattr(function, "__func__", function)):
        loaded = writes_of(one.__code__).loaded
        yield from ((name, value) for name, value in one.__globals__.items() if name in loaded)
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing was bound to it so far
                yield name, cell.cell_contents
