"""Our own failure in a callback is one line of the report, never an error in the user's cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs our callbacks and collects what went wrong in them, each thing once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def note(self, problem: str) -> None:
        """Add a line to the report's problems, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def remark(self, text: str) -> None:
        """Add a line to the report's notes, once."""
        if text not in self.notes:
            self.notes.append(text)

    def run(self, what: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `call` returns, or None and a note that `what` failed."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any failure of ours must leave the user's cell alone; it is reported
            self.note(f"{what} failed: {_one_line(error)}")
            return None


def _one_line(error: BaseException) -> str:
    text: Any = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
