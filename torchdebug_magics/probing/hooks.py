"""The only calls of torch's hook APIs. Every hook of ours knows its owner, so that a sweep finds what an interrupt left behind."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchdebug_magics.probing.dispatch import is_passed_by, modes, not_compiled, take_off
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.wrappers import MARK, tracers, unwrap_all, wrap, wrap_switch

_TABLES: tuple[tuple[object, str], ...] = (
    *((torch_module, name) for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")),
    (torch_optimizer, "_global_optimizer_pre_hooks"),
    (torch_optimizer, "_global_optimizer_post_hooks"),
)
_ON_ALL: tuple[tuple[dict[int, Any], ...], ...] = (
    (torch_module._global_forward_pre_hooks,),
    (torch_module._global_forward_hooks, torch_module._global_forward_hooks_with_kwargs, torch_module._global_forward_hooks_always_called),
)
"""The hooks on the calls of all modules, and the flags of each."""
_ON_BIRTHS = tuple(getattr(torch_module, f"_global_{part}_registration_hooks") for part in ("module", "parameter", "buffer"))
"""Whatever traces a model makes modules of its own, of which nobody is to be told."""


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
        return None if is_passed_by(self._torchdebug_owner) else self.call(*args, **kwargs)

    def __deepcopy__(self, _memo: object) -> Hook:
        if isinstance(self._torchdebug_owner, Hooks):
            self._torchdebug_owner.were_copied = True
        return Hook(self._torchdebug_owner, _nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built from the standard library alone, as whoever loads the model need not have this package. Auditing returns None.
        return functools.partial, (sys.audit, "torchdebug.hook")


class Hooks:
    """The hooks of one probe, each put on the session's stack. With its guard, they pass by what other sessions compute, or run again."""

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard
        self.were_copied = False
        """Whether a module was copied with a hook on it: then every module alive must be swept."""
        self._times_aside = 0
        self._aside: list[tuple[dict[int, Any], int, Any, bool]] = []
        """(table, key, hook or flag, whether it was the first) of those that are set aside."""

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
        wrap(stack, self, torch.autograd, name, around)

    def zeroed_gradients(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, holder, ...)` in place of ``zero_grad`` of every optimizer and module."""
        wrap(stack, self, torch.optim.Optimizer, "zero_grad", around)
        wrap(stack, self, torch.nn.Module, "zero_grad", around)

    def model_states(self, stack: ExitStack, taken: Callable[..., Any], loaded: Callable[..., Any]) -> None:
        """`taken(original, module, ...)` in place of each ``state_dict``, `loaded(...)` in place of each ``load_state_dict``."""
        wrap(stack, self, torch.nn.Module, "state_dict", taken)
        wrap(stack, self, torch.nn.Module, "load_state_dict", loaded)

    def clipped_gradients(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, parameters, max_norm, total_norm, ...)` where ``clip_grad_norm_``, however imported, scales the gradients."""
        wrap(stack, self, torch.nn.utils.clip_grad, "_clip_grads_with_norm_", around)

    def grouped_gradients(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, gradients)` where ``clip_grad_norm_`` and ``clip_grad_value_`` take the gradients that they clip."""
        wrap(stack, self, torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", around)

    def scheduled_values(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, group, key, value)` where a learning rate scheduler sets a value of a parameter group."""
        wrap(stack, self, torch.optim.lr_scheduler, "_update_param_group_val", around)

    def loader_batches(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, iterator)` whenever a running `DataLoader` is asked for its next batch."""
        wrap(stack, self, _BaseDataLoaderIter, "__next__", around)

    def unnoticed(self, stack: ExitStack) -> None:
        """Ours are none of those hooks on all modules of which a compiled module would warn the user at each call."""
        wrap(stack, self, torch_module, "_has_any_global_hook", _has_hook_of_others)

    def ends_of_saving(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, message)` where hooks on what is saved are to be switched off, as ``torch.func`` cannot bear them."""
        wrap(stack, self, torch.autograd.graph, "disable_saved_tensors_hooks", around)

    def compiler_switches(self, stack: ExitStack, turned: Callable[[Any, FrameType], None]) -> None:
        """`turned(compiler, frame)` when torch's compiler is about to be turned on, by the call in that frame, or back to what it was."""
        wrap_switch(stack, self, turned)

    def tracers(self, stack: ExitStack, around: Callable[..., Any]) -> None:
        """`around(original, *args, **kwargs)` wherever a model is turned into code that runs by itself: TorchScript, ``torch.export``."""
        for holder, name in tracers():
            wrap(stack, self, holder, name, around)

    def set_aside(self, modules: Iterable[torch.nn.Module]) -> None:
        """Take the hooks on calls off, on all modules and on these, and those on new modules, until they are put back as many times."""
        self._times_aside += 1
        if self._times_aside > 1:
            return
        for calls, *flags in (*_ON_ALL, *((table,) for table in _ON_BIRTHS), *(tables for module in modules for tables in _on(module))):
            for key in [key for key, hook in calls.items() if getattr(hook, MARK, None) is self]:
                is_first = next(iter(calls)) == key
                self._aside += [(table, key, table.pop(key), is_first) for table in (*flags, calls) if key in table]

    def put_back(self, *, at_last: bool = False) -> None:
        """Put back the hooks set aside: the first hook as the first, any other as the last; `at_last`: however often they were."""
        self._times_aside = 0 if at_last else max(0, self._times_aside - 1)
        while self._aside and not self._times_aside:
            table, key, hook, is_first = self._aside.pop()
            table[key] = hook
            if is_first and isinstance(table, OrderedDict):
                table.move_to_end(key, last=False)

    def sweep(self, modules: Iterable[torch.nn.Module] = ()) -> int:
        """Remove every hook and mode of this probe; how many there were."""
        removed = 0
        for owner, name in _TABLES:
            removed += self._drop(getattr(owner, name, {}))
        for module in (*modules, *_live_modules()) if self.were_copied else modules:
            removed += sum(self._drop(*tables) for tables in _on(module))
        self._aside.clear()
        self._times_aside = 0
        removed += unwrap_all(self)
        return removed + sum(take_off(mode) for mode in modes() if getattr(mode, MARK, None) is self)

    def _drop(self, table: dict[int, Any], *beside: dict[int, bool]) -> int:
        ours = [key for key, hook in table.items() if getattr(hook, MARK, None) is self]
        for key in ours:
            for entries in (table, *beside):
                entries.pop(key, None)
        return len(ours)


def _has_hook_of_others(_original: Callable[[], bool]) -> bool:
    tables = (getattr(torch_module, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward"))
    return any(not hasattr(hook, MARK) for table in tables for hook in table.values())


def _on(module: torch.nn.Module) -> tuple[tuple[dict[int, Any], ...], ...]:
    """The hooks on the calls of one module, and their flags."""
    return (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
    )


def _live_modules() -> list[torch.nn.Module]:
    return [value for value in gc.get_objects() if issubclass(type(value), torch.nn.Module) and "_forward_hooks" in value.__dict__]


def _nothing(*_: object, **__: object) -> None:
    """What a copied hook does."""
