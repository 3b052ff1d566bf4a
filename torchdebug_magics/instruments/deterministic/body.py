"""What is run a second time: the body of a cell, or a function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
    def statements(self) -> Sequence[ast.stmt]:
        """Its source, where that is known."""

    @property
    def refusal(self) -> str:
        """Why it cannot be run a second time, or nothing."""

    def run(self) -> None:
        """Once more. What it raises is raised; what it prints is not seen."""


class FunctionBody:
    """A call of a function without arguments."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.namespace: dict[str, Any] = {}
        self.hidden: frozenset[str] = frozenset()
        self.roots = (function,)
        self.statements: tuple[ast.stmt, ...] = ()
        self.refusal = ""
        self._function = function

    def run(self) -> None:
        """Call it, and drop what it gives."""
        self._function()
