"""Watches for outermost module calls, with hooks on the modules that are called so and on no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.probing.modules import compiled_parts, fast_path_parts, is_compiled, parts_of

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard
    from torchdebug_magics.probing.hooks import Hooks

__all__ = ["OutermostCalls"]

Entered: TypeAlias = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Left: TypeAlias = Callable[[torch.nn.Module, Any], None]


class OutermostCalls:
    """Tells of every call of a module that no other module makes, in one thread: the first in which anything was called.

    `entered` may give other arguments, as a pre-hook may. What `entered` and `left` raise reaches the user: they guard themselves.
    """

    def __init__(self, hooks: Hooks, guard: Guard, entered: Entered, left: Left, *, found: Callable[[], None] = lambda: None) -> None:
        self._hooks = hooks
        self._guard = guard
        self._entered = entered
        self._left = left
        self._found = found
        """Told when there is one more module, or one has become a part of another."""
        self.depth = 0
        """How many calls run, one inside another."""
        self._thread: int | None = None
        self._called: set[int] = set()
        self._watched: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._parts: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._stacks: dict[int, ExitStack] = {}
        self._stack = ExitStack()

    def attach(self, stack: ExitStack, modules: Sequence[torch.nn.Module]) -> None:
        """Watch `modules`, which are all that are alive, and those still to be made."""
        stack.enter_context(self._stack)
        stack.callback(self._forget)
        self._parts.update(parts_of(modules))
        inside = compiled_parts(modules) | fast_path_parts(modules)
        for module in modules:
            if id(module) not in inside:
                self._watch(module)
        self._hooks.module_birth(self._stack, self._born, self._adopted)
        self._hooks.unnoticed(self._stack)

    def modules(self) -> list[torch.nn.Module]:
        """Every module that carries a hook of ours."""
        return list(self._watched.values())

    def is_ours(self) -> bool:
        """Whether this is the thread that trains."""
        if self._thread is None:
            self._thread = get_ident()
        return self._thread == get_ident()

    def settle(self) -> None:
        """Take the hooks off the parts that were never called outermost so far."""
        for key in [key for key in self._watched if key not in self._called and key in self._parts]:
            del self._watched[key]
            self._stacks.pop(key).close()

    def _watch(self, module: torch.nn.Module) -> None:
        if id(module) in self._watched or is_compiled(module) or fast_path_parts([module]) or isinstance(module, torch.jit.ScriptModule):
            return
        if "_forward_pre_hooks" not in module.__dict__:
            return
        self._found()
        self._watched[id(module)] = module
        mine = self._stacks[id(module)] = self._stack.enter_context(ExitStack())
        self._hooks.own_calls(mine, module, self._before, self._after)

    def _born(self, module: torch.nn.Module) -> None:
        self._guard.run("the watch over a new module", self._watch, module)

    def _adopted(self, child: torch.nn.Module) -> None:
        self._parts[id(child)] = child
        self._found()

    def _forget(self) -> None:
        self._watched.clear()
        self._parts.clear()
        self._stacks.clear()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self.is_ours():
            return None
        self.depth += 1
        if self.depth > 1:
            return None
        self._called.add(id(module))
        return self._entered(module, args, kwargs)

    def _after(self, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.is_ours():
            return
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            self._left(module, output)
