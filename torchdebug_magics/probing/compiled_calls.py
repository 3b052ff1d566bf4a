"""Calls of compiled functions. Meanwhile hooks of ours are away: what the compiler finds there it builds in, and asks for at each call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from torchdebug_magics.probing.where import local_values

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import FrameType

    import torch

    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["CompiledCalls", "away_from_the_compiler"]

Entered: TypeAlias = Callable[[int], None]
Left: TypeAlias = Callable[[Any], None]

_CALL, _RESULT = "compile_wrapper", frozenset({"result"})
"""What torch calls the function that stands for a compiled one, and in it what that has returned."""


def away_from_the_compiler(stack: ExitStack, hooks: Hooks, guard: Guard) -> None:
    """Until the stack closes, hooks on all modules are away while a compiled function runs, and torch warns of none of them."""
    here = threading.get_ident()
    hooks.unnoticed(stack)
    CompiledCalls(hooks, guard, tuple, lambda: threading.get_ident() == here, lambda _: None, lambda _: None).attach(stack)


class CompiledCalls:
    """Tells of every call of a compiled function that no other one makes, in one thread."""

    def __init__(
        self,
        hooks: Hooks,
        guard: Guard,
        modules: Callable[[], Iterable[torch.nn.Module]],
        is_ours: Callable[[], bool],
        entered: Entered,
        left: Left,
    ) -> None:
        self._hooks = hooks
        self._guard = guard
        self._modules = modules
        """Those that carry hooks of their own."""
        self._is_ours = is_ours
        """Whether the thread is the one."""
        self._entered = entered
        """Called with a number for the function."""
        self._left = left
        """Called with what it has returned; with None where it has raised."""
        self._running: list[int] = []
        """The ids of the frames of those that run."""

    def attach(self, stack: ExitStack) -> None:
        """Until the stack closes."""
        self._hooks.compiler_switches(stack, self._turned)
        stack.callback(self._hooks.put_back)

    def _turned(self, compiler: Any, frame: FrameType) -> None:
        self._guard.run("the watch over compiled calls", self._look, compiler, frame)

    def _look(self, compiler: Any, frame: FrameType) -> None:
        if frame.f_code.co_name != _CALL or not self._is_ours():
            return  # what is kept from the compiler turns it off, and on again
        if self._running and self._running[-1] == id(frame):
            self._running.pop()
            if not self._running:
                self._hooks.put_back()
                self._left(local_values(frame, _RESULT).get("result"))
        elif compiler is not None:
            self._running.append(id(frame))
            if len(self._running) == 1:
                try:
                    self._entered(id(compiler))
                finally:
                    self._hooks.set_aside(self._modules())
