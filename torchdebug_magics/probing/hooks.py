"""The only calls of torch's hook APIs. Every hook of ours knows its owner, so that a sweep finds what an interrupt left behind."""

from __future__ import annotations

import functools
import gc
import pkgutil
import sys
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.compiler import is_compiling
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchdebug_magics.probing.compiling import not_compiled
from torchdebug_magics.probing.mode_stack import modes, take_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import ExitStack

__all__ = ["Hook", "Hooks"]

MARK = "_torchdebug_owner"
"""Found by name, as `%autoreload` replaces classes and would defeat `isinstance`."""

_TABLES: tuple[tuple[object, str], ...] = (
    *((torch_module, name) for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")),
    (torch_optimizer, "_global_optimizer_pre_hooks"),
    (torch_optimizer, "_global_optimizer_post_hooks"),
)


_WRAPPED: tuple[tuple[Any, str], ...] = ((torch.autograd, "backward"), (torch.autograd, "grad"), (_BaseDataLoaderIter, "__next__"))


class Hook:
    """A callable that the sweep can recognise.

    A copy of a module that is made while we watch takes its hooks along: copied or pickled, ours is something that does nothing.
    """

    def __init__(self, owner: object, call: Callable[..., Any]) -> None:
        self._torchdebug_owner = owner
        self.call = call

    @not_compiled(nor_what_it_calls=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls."""
        __tracebackhide__ = True
        return self.call(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> Hook:
        if isinstance(self._torchdebug_owner, Hooks):
            self._torchdebug_owner.were_copied = True
        return Hook(self._torchdebug_owner, _nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built from the standard library alone, as whoever loads the model need not have this package. Auditing returns None.
        return functools.partial, (sys.audit, "torchdebug.hook")


class _Wrapper(Hook):
    """Stands in the place of a function, or a method, of torch's; once closed, it is only a longer way to it."""

    def __init__(self, owner: object, around: Callable[..., Any], holder: Any, name: str) -> None:
        super().__init__(owner, around)
        self.place = f"{holder.__module__}:{holder.__qualname__}.{name}" if isinstance(holder, type) else f"{holder.__name__}:{name}"
        self.original: Callable[..., Any] = getattr(holder, name)
        self.is_open = True

    @not_compiled(nor_what_it_calls=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What stands where the original stood."""
        __tracebackhide__ = True
        if not self.is_open:
            return self.original(*args, **kwargs)
        compiler = set_eval_frame(None)
        try:
            return self.call(functools.partial(_under, compiler, self.original), *args, **kwargs)
        finally:
            set_eval_frame(compiler)

    def __get__(self, instance: object, _owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __deepcopy__(self, _memo: object) -> _Wrapper:
        return self  # as a function is

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self.place,)


def _under(compiler: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is the user's in a backward pass (hooks, what a checkpoint runs again) is compiled as it is without us."""
    __tracebackhide__ = True
    set_eval_frame(compiler)
    try:
        return original(*args, **kwargs)
    finally:
        set_eval_frame(None)


def _only(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a wrapper that was closed in the middle of a call still does."""
    __tracebackhide__ = True
    return original(*args, **kwargs)


class Hooks:
    """The hooks of one probe, each put on the session's stack."""

    def __init__(self) -> None:
        self.were_copied = False
        """Whether a module was copied with a hook on it: then every module alive must be swept."""

    def __deepcopy__(self, _memo: object) -> Hooks:
        return self

    def optimizer_steps(self, stack: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """`before(optimizer, args, kwargs)` and `after(...)` around every optimizer's `step`."""
        stack.enter_context(torch_optimizer.register_optimizer_step_pre_hook(Hook(self, before)))
        stack.enter_context(torch_optimizer.register_optimizer_step_post_hook(Hook(self, after)))

    def module_calls(self, stack: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """`before(module, args)` and `after(module, args, output)` around every call of every module, also of one that raises."""
        stack.enter_context(torch_module.register_module_forward_pre_hook(Hook(self, before)))
        stack.enter_context(torch_module.register_module_forward_hook(Hook(self, after), always_call=True))

    def calls_in_full(self, stack: ExitStack, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """As `module_calls`, and `after(module, args, kwargs, output)`; of a call that raised torch tells no kwargs: they are None."""
        stack.enter_context(torch_module.register_module_forward_pre_hook(Hook(self, before)))
        self.call_ends(stack, after)

    def call_starts(self, stack: ExitStack, before: Callable[..., Any]) -> None:
        """`before(module, args)`, a plain function, at every module call: as cheap as torch's hooks can be."""
        setattr(before, MARK, self)
        stack.enter_context(torch_module.register_module_forward_pre_hook(before))

    def call_ends(self, stack: ExitStack, after: Callable[..., Any]) -> None:
        """`after(module, args, kwargs, output)` at the end of every module call; see `calls_in_full`."""

        def leaving(module: torch.nn.Module, args: Any, *rest: Any) -> None:
            if not is_compiling():
                after(module, args, *((None, *rest) if len(rest) == 1 else rest))

        handle = torch_module.register_module_forward_hook(Hook(self, leaving), with_kwargs=True, always_call=True)
        stack.callback(torch_module._global_forward_hooks_with_kwargs.pop, handle.id, None)  # torch forgets it there
        stack.enter_context(handle)

    def own_calls(self, stack: ExitStack, module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """`before(module, args, kwargs)`, first of all hooks, and `after(module, args, kwargs, output)`, last, of one module."""
        stack.enter_context(module.register_forward_pre_hook(Hook(self, before), prepend=True, with_kwargs=True))
        stack.enter_context(module.register_forward_hook(Hook(self, after), with_kwargs=True, always_call=True))

    def module_birth(self, stack: ExitStack, born: Callable[[torch.nn.Module], None], adopted: Callable[[torch.nn.Module], None]) -> None:
        """`born(module)` when a module gets its first parts, `adopted(child)` when it becomes a part of another one."""

        def submodule(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
            born(parent)
            if child is not None:
                born(child)
                adopted(child)

        def part(parent: torch.nn.Module, _name: str, _part: object) -> None:
            born(parent)

        stack.enter_context(torch_module.register_module_module_registration_hook(Hook(self, submodule)))
        stack.enter_context(torch_module.register_module_parameter_registration_hook(Hook(self, part)))
        stack.enter_context(torch_module.register_module_buffer_registration_hook(Hook(self, part)))

    def autograd_calls(self, stack: ExitStack, name: str, around: Callable[..., Any]) -> None:
        """`around(original, *args, **kwargs)` in place of ``torch.autograd.<name>``, which `Tensor.backward` looks up at each call."""
        self._wrap(stack, torch.autograd, name, around)

    def loader_batches(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, iterator)` whenever a running `DataLoader` is asked for its next batch."""
        self._wrap(stack, _BaseDataLoaderIter, "__next__", around)

    def _wrap(self, stack: ExitStack, holder: Any, name: str, around: Callable[..., Any]) -> None:
        wrapper = _Wrapper(self, around, holder, name)
        stack.callback(_unwrap, holder, name, wrapper)
        setattr(holder, name, wrapper)

    def sweep(self, modules: Iterable[torch.nn.Module] = ()) -> int:
        """Remove every hook and mode of this probe; how many there were."""
        removed = 0
        for owner, name in _TABLES:
            removed += self._drop(getattr(owner, name, {}))
        for module in (*modules, *_live_modules()) if self.were_copied else modules:
            removed += self._drop(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
            removed += self._drop(module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
        for holder, name in _WRAPPED:
            removed += sum(_unwrap(holder, name, wrapper) for wrapper in _wrappers(holder, name) if wrapper._torchdebug_owner is self)
        return removed + sum(take_off(mode) for mode in modes() if getattr(mode, MARK, None) is self)

    def _drop(self, table: dict[int, Any], *beside: dict[int, bool]) -> int:
        ours = [key for key, hook in table.items() if getattr(hook, MARK, None) is self]
        for key in ours:
            for one in (table, *beside):
                one.pop(key, None)
        return len(ours)


def _live_modules() -> list[torch.nn.Module]:
    return [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module) and "_forward_hooks" in one.__dict__]


def _nothing(*_: object, **__: object) -> None:
    """What a copied hook does."""


def _wrappers(holder: Any, name: str) -> list[_Wrapper]:
    """Ours around a function of torch's, the outermost first."""
    found, current = [], getattr(holder, name)
    while hasattr(current, MARK):
        found.append(current)
        current = current.original
    return found


def _unwrap(holder: Any, name: str, wrapper: _Wrapper) -> bool:
    """Take one wrapper out of the chain, also when a later session's stands before it; whether it stood there."""
    chain = _wrappers(holder, name)
    # Whoever kept a reference to it, as torch's compiler does for good, now calls the original, and holds no probe.
    wrapper.is_open, wrapper.call = False, _only
    if wrapper not in chain:
        return False
    place = chain.index(wrapper)
    if place:
        chain[place - 1].original = wrapper.original
    else:
        setattr(holder, name, wrapper.original)
    return True
