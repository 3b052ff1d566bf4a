"""Meets each op of a thread before it runs and again behind it, for those who keep a record of it."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import FrameType
from typing import Any, Generic, TypeVar

from torchdebug_magics.probing.dispatch import ResultListener, enter, modes, put_unnoticed
from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.lines import Line, Lines

OpT = TypeVar("OpT")


class _Running(threading.local, Generic[OpT]):
    """The op that runs, by thread: autograd has one for each device."""

    op: OpT | None = None


class OpRecorder(ABC, Generic[OpT]):
    """Calls `begins` and `ends` for each op while it is attached.

    A failure of ours costs what is known of the op, and never the op. `takes_apart`: of an op on a DTensor, what it computes and
    communicates in this process is met in its place. `runs_eagerly`: so is what torch's compiler has compiled, op by op.
    """

    def __init__(self, hooks: Hooks, guard: Guard, *, takes_apart: bool = False, runs_eagerly: bool = False) -> None:
        self.lines: Lines[Line] = Lines(Line)
        self.guard = guard
        self._hooks = hooks
        self._runs_eagerly = runs_eagerly
        self._takes_apart = takes_apart
        self._running: _Running[OpT] = _Running()

    @abstractmethod
    def begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> OpT | None:
        """The record of an op that is about to run; None for one that is passed by."""

    @abstractmethod
    def ends(self, op: OpT, args: tuple[Any, ...], result: Any) -> None:
        """The op has returned that."""

    def failed(self, error: Exception) -> None:
        """A failure of ours: the op has no record."""
        self.guard.note(f"recording an op failed: {type(error).__name__}: {error}")

    def attach(self, stack: ExitStack, height: int | None = None) -> None:
        """Meet ops until the stack closes; with so many modes below, by default all that stand."""
        kinds = {"takes_apart": self._takes_apart, "sees_compiled": self._runs_eagerly}
        mode = ResultListener(self._after, self._raised, self._hooks, before=self._before, **kinds)  # not kept, which would be a cycle
        if self._runs_eagerly:
            enter(stack, mode)
        else:
            put_unnoticed(stack, mode, len(modes()) if height is None else height)

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._running.op = None
            dispatch = sys._getframe(1)
            self._running.op = self.begins(func, args, kwargs, dispatch.f_back or dispatch)  # a thread of autograd's has no other frame
        except Exception as error:  # noqa: BLE001 - as the guard, without the cost of a call for every op
            self.failed(error)

    def _after(self, _func: Any, args: tuple[Any, ...], result: Any) -> None:
        op, self._running.op = self._running.op, None
        if op is None:
            return
        try:
            self.ends(op, args, result)
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)

    def _raised(self, _func: Any, _error: BaseException) -> None:
        self._running.op = None
