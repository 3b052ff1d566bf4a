"""Run a model so that it, and all around it, is afterwards as it was before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchdebug_magics.probing.modules import unwrapped
from torchdebug_magics.probing.rng import RandomState

__all__ = ["untouched"]

_CONTAINERS = (list, dict, set)
_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def untouched(model: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, each parameter, buffer and tensor attribute of `model` is its `stand_in`; compiled parts run as they were written.

    Afterwards every attribute of every module, random generators and torch's flags are what they were.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    with ExitStack() as stack:
        stack.callback(RandomState.take().put_back)
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it hides the parts of attention from hooks and formulas
        stack.enter_context(_quiet())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules:
            stack.callback(_Kept(module).put_back)
        for module in modules:
            _replace(module, stand_in)
        yield


class _Kept:
    """The attributes of one module, with what its tables and containers hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._containers = [(value, _copy(value)) for value in self._attributes.values() if type(value) in _CONTAINERS]

    def put_back(self) -> None:
        own = self._module.__dict__
        own.clear()
        own.update(self._attributes)
        for container, kept in self._containers:
            _refill(container, kept)


def _copy(container: Any) -> Any:
    return type(container)(container)


def _refill(container: Any, kept: Any) -> None:
    if type(container) is list:
        container[:] = kept
    else:
        container.clear()
        container.update(kept)


def _replace(module: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
    own = module.__dict__
    for name, value in list(own.items()):
        if isinstance(value, torch.Tensor):
            own[name] = stand_in(value)
    for table in _TABLES[:2]:
        for name, value in own[table].items():
            if value is not None and not isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
                own[table][name] = stand_in(value)
    for name, child in own["_modules"].items():
        if child is not None:
            own["_modules"][name] = unwrapped(child)
    if own.get("_compiled_call_impl") is not None:
        own["_compiled_call_impl"] = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake ops log each failure as an error, with a traceback; it is reported in our own words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
