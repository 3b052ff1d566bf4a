"""The only calls of torch's hook APIs. Every hook of ours carries a mark by which a sweep finds what an interrupt left behind."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

__all__ = ["Hook", "autograd_calls", "module_birth", "module_calls", "optimizer_steps", "own_calls", "sweep"]

MARK = "_torchdebug_hook"
"""Found by name, as `%autoreload` replaces classes and would defeat `isinstance`."""


class Hook:
    """A callable that the sweep can recognise.

    A copy of a module that is made while we watch takes its hooks along: copied or pickled, ours is something that does nothing.
    """

    _torchdebug_hook = True

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any] | None = None) -> None:
        self.call = call
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls."""
        __tracebackhide__ = True
        return self.call(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built from the standard library alone, as whoever loads the model need not have this package. Auditing returns None.
        return functools.partial, (sys.audit, "torchdebug.hook")


def _nothing(*_: object, **__: object) -> None:
    """What a copied hook does."""


def optimizer_steps(stack: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """`before(optimizer, args, kwargs)` and `after(...)` around every optimizer's `step`."""
    stack.enter_context(torch_optimizer.register_optimizer_step_pre_hook(Hook(before)))
    stack.enter_context(torch_optimizer.register_optimizer_step_post_hook(Hook(after)))


def module_calls(stack: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """`before(module, args)` and `after(module, args, output)` around every call of every module, also of one that raises."""
    stack.enter_context(torch_module.register_module_forward_pre_hook(Hook(before)))
    stack.enter_context(torch_module.register_module_forward_hook(Hook(after), always_call=True))


def own_calls(stack: ExitStack, module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """`before(module, args, kwargs)`, first of all hooks, and `after(module, args, kwargs, output)`, last, around calls of one module."""
    stack.enter_context(module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True))
    stack.enter_context(module.register_forward_hook(Hook(after), with_kwargs=True, always_call=True))


def module_birth(stack: ExitStack, born: Callable[[torch.nn.Module], None], adopted: Callable[[torch.nn.Module], None]) -> None:
    """`born(module)` when a module gets its first parts, `adopted(child)` when it becomes a part of another one."""

    def submodule(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
        born(parent)
        if child is not None:
            born(child)
            adopted(child)

    def part(parent: torch.nn.Module, _name: str, _part: object) -> None:
        born(parent)

    stack.enter_context(torch_module.register_module_module_registration_hook(Hook(submodule)))
    stack.enter_context(torch_module.register_module_parameter_registration_hook(Hook(part)))


def autograd_calls(stack: ExitStack, name: str, around: Callable[..., Any]) -> None:
    """Call `around(original, *args, **kwargs)` in place of ``torch.autograd.<name>``, which `Tensor.backward` looks up at each call."""
    original = getattr(torch.autograd, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return around(original, *args, **kwargs)

    hook = Hook(call, original)
    stack.callback(_put_back, name, hook)
    setattr(torch.autograd, name, hook)


def _put_back(name: str, hook: Hook) -> None:
    """Take one wrapper out of the chain, also when a later session's wrapper stands before it."""
    current, outer = getattr(torch.autograd, name), None
    while current is not hook and getattr(current, MARK, False):
        outer, current = current, current.original
    if current is not hook:
        return
    if outer is None:
        setattr(torch.autograd, name, hook.original)
    else:
        inner = hook.original
        outer.original = inner
        hook.original = inner


_TABLES: tuple[tuple[object, str], ...] = (
    *((torch_module, name) for name in vars(torch_module) if name.startswith("_global_") and "hooks" in name),
    (torch_optimizer, "_global_optimizer_pre_hooks"),
    (torch_optimizer, "_global_optimizer_post_hooks"),
)


def sweep(modules: Iterable[torch.nn.Module] = ()) -> int:
    """Remove every hook and mode of ours from torch's global tables and from `modules`; how many there were.

    Only to be called when no session is open: it cannot tell whose hook it is.
    """
    removed = 0
    for owner, name in _TABLES:
        table = getattr(owner, name, None)
        if isinstance(table, dict):
            removed += _drop(table)
    for module in modules:
        removed += _drop(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        removed += _drop(module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    for name in ("backward", "grad"):
        while getattr(getattr(torch.autograd, name), MARK, False):
            setattr(torch.autograd, name, getattr(torch.autograd, name).original)
            removed += 1
    while any(getattr(mode, MARK, False) for mode in _get_current_dispatch_mode_stack()):
        _pop_mode()
        removed += 1
    return removed


def _drop(table: dict[int, Any], *beside: dict[int, bool]) -> int:
    ours = [key for key, hook in table.items() if getattr(hook, MARK, False)]
    for key in ours:
        for one in (table, *beside):
            one.pop(key, None)
    return len(ours)
