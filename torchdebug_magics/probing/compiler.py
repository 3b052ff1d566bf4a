"""Keeps hooks of ours out of compiled, scripted and exported code, and tells of calls of compiled functions.

Whatever the compiler finds among a module's hooks it builds in, and asks for at each call: a hook of ours would be one compilation more,
and another one when it is gone. TorchScript and ``torch.export`` refuse a model that carries one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import Any, TypeAlias

import torch

from torchdebug_magics.probing.hooks import Hooks
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.source.user_code import local_values

Entered: TypeAlias = Callable[[int], None]
Left: TypeAlias = Callable[[Any], None]
_CALL, _RESULT = "compile_wrapper", frozenset({"result"})
"""What torch calls the function that stands for a compiled one, and in it what that has returned."""


def away_from_the_compiler(stack: ExitStack, hooks: Hooks, guard: Guard) -> None:
    """Until the stack closes, hooks on all modules are away while a compiled function runs, and torch warns of none of them."""
    here = threading.get_ident()
    hooks.unnoticed(stack)
    CompiledCalls(hooks, guard, tuple, lambda: threading.get_ident() == here, lambda _: None, lambda _: None).attach(stack)


def eager() -> AbstractContextManager[Any]:
    """What is compiled runs op by op, and nothing is compiled, least of all our own hooks."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class CompiledCalls:
    """Tells of every call of a compiled function that no other one makes, in one thread. Meanwhile the hooks are away."""

    def __init__(
        self,
        hooks: Hooks,
        guard: Guard,
        modules: Callable[[], Iterable[torch.nn.Module]],
        is_ours: Callable[[], bool],
        entered: Entered,
        left: Left,
        traced: Callable[[], object] = lambda: None,
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
        self._traced = traced
        """Called before a model is turned into code."""
        self._running: list[int] = []
        """The ids of the frames of those that run."""

    def attach(self, stack: ExitStack) -> None:
        """Until the stack closes."""
        self._hooks.compiler_switches(stack, self._turned)
        self._hooks.tracers(stack, self._around_a_tracer)
        stack.callback(self._hooks.put_back, at_last=True)

    def _around_a_tracer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not self._is_ours():
            return original(*args, **kwargs)
        self._guard.run("setting the hooks aside", self._hooks.set_aside, self._modules())
        self._guard.run("the watch over traced models", self._traced)
        try:
            return original(*args, **kwargs)
        finally:
            self._guard.run("putting the hooks back", self._hooks.put_back)

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
