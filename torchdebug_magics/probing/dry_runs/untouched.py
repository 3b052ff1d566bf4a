"""Run a model so that it, and all around it, is afterwards as it was before."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn.modules import module as torch_module

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.probing.contents import Writes
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.dry_runs.inputs import is_lazy
from torchdebug_magics.probing.guard import Guard
from torchdebug_magics.probing.modules import followed, unwrapped
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.rng import RandomState
from torchdebug_magics.probing.snapshot import Snapshot
from torchdebug_magics.probing.unsent_collectives import LoneRerun, is_spread

_CONTAINERS = (list, dict, set, OrderedDict)
_UNDONE = "the forward {}, which cannot be undone after a dry run"
_TABLES = ("_parameters", "_buffers", "_modules")
_DEEP = 4
"""How far lists in lists are searched for modules that no table knows."""


@contextmanager
def untouched(
    model: torch.nn.Module, given: Any, stand_in: Callable[[torch.Tensor], torch.Tensor], writes: Writes, guard: Guard
) -> Iterator[None]:
    """Inside, each parameter, buffer and tensor attribute of `model` is its `stand_in`; compiled parts run as they were written.

    Afterwards every attribute of every module, what hooks and globals hold, the arguments `given`, random generators and torch's flags
    are what they were; `guard` notes what resists.
    """
    modules = _modules(model)
    effects = Effects(guard, sentence=_UNDONE, looks=False)
    try:
        with effects.trial(), ExitStack() as stack:
            stack.enter_context(RandomState.kept())
            _keep_flags(stack)
            stack.enter_context(_quiet())
            stack.callback(Snapshot([given, *_surroundings(modules)]).put_back, guard)
            stack.callback(writes.put_back)
            for module in modules:
                if isinstance(module, torch.jit.ScriptModule):
                    stack.callback(_Scripted(module).put_back)
                else:
                    stack.callback(_Kept(module).put_back)
            for module in modules:
                if not isinstance(module, torch.jit.ScriptModule):
                    _replace(module, stand_in)
            _keep_alone(stack, modules)
            yield
    except Irrevocable as act:
        raise TorchDebugError(str(act)) from None
    finally:
        effects.finish()


def _keep_alone(stack: ExitStack, modules: list[torch.nn.Module]) -> None:
    """In a rank of a job nothing is sent; but what is spread over ranks is called in all of them, or in none."""
    alone = LoneRerun()
    stack.callback(alone.put_back)
    alone.start()
    if not any(map(is_spread, modules)):
        alone.attach(stack)


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """All parts, with those that stand in plain lists and behind compilers."""
    found: dict[int, torch.nn.Module] = {}
    todo: list[torch.nn.Module] = [model]
    while todo:
        for module in followed(unwrapped(todo.pop())):
            if id(module) not in found:
                found[id(module)] = module
                if not isinstance(module, torch.jit.ScriptModule):
                    todo += _hidden(value for name, value in module.__dict__.items() if name not in _TABLES)
                    todo += (child for child in module._modules.values() if child is not None and unwrapped(child) is not child)
    return list(found.values())


def _hidden(values: Iterable[Any], depth: int = 0) -> Iterator[torch.nn.Module]:
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield value
        elif depth < _DEEP and type(value) in {list, tuple, dict}:
            yield from _hidden(value.values() if type(value) is dict else value, depth + 1)


def _surroundings(modules: Iterable[torch.nn.Module]) -> Iterator[object]:
    """Where the code of modules and hooks may leave something: non-empty attributes, the classes themselves, global hooks."""
    kinds: set[type] = set()
    for module in modules:
        kinds.add(type(module))
        if not isinstance(module, torch.jit.ScriptModule):
            yield from (value for name, value in module.__dict__.items() if name not in _TABLES and not _is_empty(value))
    yield from kinds
    yield from (hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict) and hooks)


def _is_empty(value: object) -> bool:
    return type(value) in _CONTAINERS and not value


class _Kept:
    """The attributes of one module with what its tables hold, and its parameters as leaves of a graph."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._type = type(module)
        self._attributes = dict(module.__dict__)
        self._containers = [(value, type(value)(value)) for value in self._attributes.values() if type(value) in _CONTAINERS]
        self._leaves = [(one, one.grad, one.requires_grad) for one in module._parameters.values() if one is not None and one.is_leaf]

    def put_back(self) -> None:
        if type(self._module) is not self._type:
            self._module.__class__ = self._type
        _refill(self._module.__dict__, self._attributes)
        for container, kept in self._containers:
            _refill(container, kept)
        for leaf, grad, requires_grad in self._leaves:
            if leaf.grad is not grad:
                leaf.grad = grad
            if leaf.requires_grad != requires_grad:
                leaf.requires_grad_(requires_grad)


def _refill(container: Any, kept: Any) -> None:
    """Write only where something changed: other threads may look."""
    if type(container) is list:
        if len(container) != len(kept) or any(now is not before for now, before in zip(container, kept, strict=True)):
            container[:] = kept
    elif type(container) is set:
        if container != kept:
            container.clear()
            container.update(kept)
    else:
        if list(container) != list(kept):
            container.clear()
        for key, value in kept.items():
            if key not in container or container[key] is not value:
                container[key] = value


class _Scripted:
    """The buffers of a scripted module, which no stand-in can take the place of: what it computes may write them without a word."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._held = [(tensor, tensor.detach().clone(), tensor._version) for tensor in module.buffers()]
        self._training = [(part, part.training) for part in module.modules()]

    def put_back(self) -> None:
        for tensor, copy, version in self._held:
            if not torch.equal(tensor.detach(), copy):
                tensor.data.copy_(copy)
            if tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for part, training in self._training:
            if part.training != training:
                part.training = training


def _replace(module: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
    own = module.__dict__
    for name, value in list(own.items()):
        if isinstance(value, torch.Tensor):
            own[name] = stand_in(value)
    for table in _TABLES[:2]:
        for name, value in own[table].items():
            if value is not None and not is_lazy(value):
                own[table][name] = stand_in(value)
    for name, child in own["_modules"].items():
        if child is not None:
            own["_modules"][name] = unwrapped(child)
    if own.get("_compiled_call_impl") is not None:
        own["_compiled_call_impl"] = None


def _keep_flags(stack: ExitStack) -> None:
    """Torch's flags are put back, whatever the forward sets; the fused kernel of attention is off, as it hides the parts from hooks."""
    # Nobody asked this run for warnings, and what torch says but once is still to be said when the user's own run says it.
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
    torch.set_warn_always(True)
    stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
    sys.setrecursionlimit(2 * sys.getrecursionlimit())  # hooks and modes of ours stand between the frames of the user's
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    if "torch._dynamo" in sys.modules:  # else nothing can have been compiled, and importing it takes seconds
        stack.enter_context(torch.compiler.set_stance("force_eager"))


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


@contextmanager
def answers(fakes: Fakes) -> Iterator[None]:
    """Inside, what libraries ask is answered as for real tensors, so that they take the same way.

    Transformers keeps a mask of ones where a tensor is fake: ours with known values are looked at like real ones. Distributions look
    at the values of their parameters, which nobody knows.
    """
    with ExitStack() as stack:
        library: Any = sys.modules.get("transformers.utils.import_utils")
        if (asked := getattr(library, "is_fake_tensor", None)) is not None:
            stack.callback(setattr, library, "is_fake_tensor", asked)
            library.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor) and fakes.value(tensor) is None
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        yield
