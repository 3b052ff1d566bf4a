"""What a run takes from outside, or leaves there: files, other effects, and what the user types."""

from __future__ import annotations

import builtins
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchdebug_magics.errors import DeterminismError
from torchdebug_magics.probing.outside.effects import Effects

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.twice.body import Body
    from torchdebug_magics.probing.guard import Guard

__all__ = ["REPEATS", "Outside"]

_STRICT = "--strict: the cell {}, which cannot be undone for a second run: move it to its own cell"
REPEATS = "the cell {}, which a second run would repeat: `--anyway` runs it all the same"


class Outside:
    """Questions are asked by the first run alone: later ones hear the same answers. Files are put back around each later run."""

    def __init__(self, body: Body | None, guard: Guard, *, strict: bool, anyway: bool = False) -> None:
        self._strict = strict
        """Whether an act that cannot be undone raises at the user's line."""
        self._answers: list[str] = []
        roots = () if body is None else (body.namespace, body.variables, *body.statements, *body.roots)
        self._effects = Effects(guard, *roots, sentence=REPEATS, anyway=anyway, prevent=self._prevent)

    @property
    def said(self) -> tuple[str, ...]:
        """What a second run does not find as the first one did."""
        return ("the answer typed for `input()`",) if self._answers else ()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the files that the first run has written, made or removed."""
        return self._effects.changed

    @property
    def refusal(self) -> str:
        """Why there can be no later run, now that the first one has ended; or nothing."""
        return self._effects.refusal

    def first(self, stack: ExitStack) -> None:
        """Note what happens, from here until the stack closes."""
        ask = builtins.input

        def asked(*prompt: Any) -> str:
            __tracebackhide__ = True
            self._prevent("asks for an answer by `input()`")
            self._answers.append(ask(*prompt))
            return self._answers[-1]

        self._effects.begin()
        self._effects.first(stack)
        _stand_in(stack, asked)

    def over(self) -> None:
        """The first run has ended."""
        self._effects.over()

    def again(self, stack: ExitStack, *, as_left: bool = False) -> None:
        """Nothing gets out, from here until the stack closes; the disk is as the first run found it, or, `as_left`, has left it."""
        answers = deque(self._answers)

        def asked(*_prompt: Any) -> str:
            if not answers:
                raise EOFError
            return answers.popleft()

        stack.enter_context(self._effects.rerun(from_end=as_left))
        _stand_in(stack, asked)

    def finish(self) -> None:
        """Everything is as the first run has left it. Harmless the second time."""
        self._effects.finish()

    def _prevent(self, what: str) -> None:
        __tracebackhide__ = True
        if self._strict:
            raise DeterminismError(_STRICT.format(what))


def _stand_in(stack: ExitStack, asked: Any) -> None:
    before = builtins.input

    def undo() -> None:
        if builtins.input is asked:  # else the user has put something there, and it stays
            builtins.input = before

    stack.callback(undo)
    builtins.input = asked
