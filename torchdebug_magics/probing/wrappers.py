"""What stands in the place of a function of torch's for the time of a session. Wrappers of several sessions stand in a chain."""

from __future__ import annotations

import functools
import pkgutil
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from types import FrameType, MethodType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.nn.modules import module as torch_module
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchdebug_magics.probing.dispatch import is_passed_by, not_compiled

MARK = "_torchdebug_owner"
"""Found by name, as `%autoreload` replaces classes and would defeat `isinstance`."""
_COMPILER, _SWITCH = "torch._dynamo.eval_frame", "_maybe_set_eval_frame"
"""Where torch turns its compiler on for the time of a call, and off: a module that takes a second to import, and the function."""
_TRACERS = (
    ("torch.jit._recursive", "create_script_module"),
    ("torch.jit._trace", "_trace_impl"),
    ("torch.jit", "trace_module"),
    ("torch.export", "export"),
    ("torch.export._trace", "_export"),  # for who imported the function of `torch.export` by name
)
"""What turns a model into code: it reads a module's hooks as if they were the model's own."""


class _Wrapper:
    """Stands in the place of a function, or a method, of torch's; once closed, it is only a longer way to it."""

    def __init__(self, owner: object, around: Callable[..., Any], holder: Any, name: str) -> None:
        self._torchdebug_owner = owner
        self.call = around
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
            original = functools.partial(_under, compiler, self.original)
            return original(*args, **kwargs) if is_passed_by(self._torchdebug_owner) else self.call(original, *args, **kwargs)
        finally:
            set_eval_frame(compiler)

    def __get__(self, instance: object, _owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __deepcopy__(self, _memo: object) -> _Wrapper:
        return self  # as a function is

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self.place,)


class _Switch(_Wrapper):
    """Stands where the compiler is turned on: nothing of ours may come between that and what it is turned on for."""

    @not_compiled(nor_what_it_calls=True)
    def __call__(self, compiler: Any) -> Any:
        """Tells of it, with the frame that turns it, and does it."""
        __tracebackhide__ = True
        if self.is_open:
            frame = sys._getframe(1)
            while frame.f_code is _Switch.__call__.__code__ and frame.f_back is not None:
                frame = frame.f_back  # of another session
            self.call(compiler, frame)
        return self.original(compiler)


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


def wrap(stack: ExitStack, owner: object, holder: Any, name: str, around: Callable[..., Any]) -> None:
    """`around(original, *args, **kwargs)` in place of `holder.name`, until the stack closes."""
    _put(stack, _Wrapper(owner, around, holder, name), holder, name)


def wrap_switch(stack: ExitStack, owner: object, turned: Callable[[Any, FrameType], None]) -> None:
    """`turned(compiler, frame)` when the call in that frame is about to turn torch's compiler on, in its thread, or back to what it was."""
    if (place := _switch()) is not None:
        _put(stack, _Switch(owner, turned, *place), *place)
        return

    def compiling(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        made = original(*args, **kwargs)
        if (place := _switch()) is not None and not any(wrapper._torchdebug_owner is owner for wrapper in _chain(*place)):
            _put(stack, _Switch(owner, turned, *place), *place)
        return made

    wrap(stack, owner, torch, "compile", compiling)  # by which it is imported


def unwrap_all(owner: object) -> int:
    """Take the owner's out; how many there were."""
    return sum(
        _take(holder, name, wrapper) for holder, name in _places() for wrapper in _chain(holder, name) if wrapper._torchdebug_owner is owner
    )


def _places() -> Iterator[tuple[Any, str]]:
    yield from ((torch.autograd, "backward"), (torch.autograd, "grad"), (_BaseDataLoaderIter, "__next__"))
    yield torch.autograd.graph, "disable_saved_tensors_hooks"
    yield from ((torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"), (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"))
    yield torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"
    yield torch.optim.lr_scheduler, "_update_param_group_val"
    yield from ((torch, "compile"), (torch_module, "_has_any_global_hook"), (BaseProcess, "start"), (threading, "excepthook"))
    if torch.distributed.is_available():
        yield from ((torch.distributed, name) for name in ("all_reduce", "broadcast", "destroy_process_group"))
        yield torch.distributed.distributed_c10d, "destroy_process_group"
    yield from ((torch.nn.parallel.DistributedDataParallel, "__init__"), (random, "seed"), (torch, "manual_seed"))
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield numpy, "seed"
    yield from tracers()
    if (place := _switch()) is not None:
        yield place


def tracers() -> list[tuple[Any, str]]:
    """The tracers that are imported, each as the module that holds it and its name there."""
    places = ((sys.modules.get(module), name) for module, name in _TRACERS)
    return [(module, name) for module, name in places if hasattr(module, name)]


def _switch() -> tuple[Any, str] | None:
    """None where the compiler was not imported so far, or is another one than we know."""
    compiler = sys.modules.get(_COMPILER)
    return (compiler, _SWITCH) if hasattr(compiler, _SWITCH) else None


def _put(stack: ExitStack, wrapper: _Wrapper, holder: Any, name: str) -> None:
    stack.callback(_take, holder, name, wrapper)
    setattr(holder, name, wrapper)


def _chain(holder: Any, name: str) -> list[_Wrapper]:
    """Ours around a function of torch's, the outermost first."""
    wrappers, current = [], getattr(holder, name)
    while hasattr(current, MARK):
        wrappers.append(current)
        current = current.original
    return wrappers


def _take(holder: Any, name: str, wrapper: _Wrapper) -> bool:
    """Take one wrapper out of the chain, also when a later session's stands before it; whether it stood there."""
    chain = _chain(holder, name)
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
