"""Run a model so that it, and all around it, is afterwards as it was before."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.probing.distributed.unsent_collectives import LoneRerun, is_spread
from torchdebug_magics.probing.dry_runs.faking import Fakes
from torchdebug_magics.probing.modules import followed, unwrapped
from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard
from torchdebug_magics.probing.state.contents import Writes
from torchdebug_magics.probing.state.snapshot import Bound, Snapshot

_UNDONE = "the forward {}, which cannot be undone after a dry run"
_TABLES = ("_parameters", "_buffers", "_modules")
_MOST_BESIDE, _MOST_OF_A_MODULE = 200_000, 64
"""Objects that are kept: the tables of all modules, which get stand-ins, and of what they lead to, the nearest."""
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
            bound = Bound(objects=_MOST_BESIDE + _MOST_OF_A_MODULE * len(modules))
            before = Snapshot([given, *modules, *_global_hooks()], bound)
            stack.callback(before.put_back, guard)
            stack.callback(writes.put_back, guard)
            _set_flags(stack)
            stack.enter_context(_quiet())
            for module in modules:
                if isinstance(module, torch.jit.ScriptModule):
                    stack.callback(_put_modes, [(part, part.training) for part in module.modules()])
                    # No stand-in can take the place of a buffer, and what is computed may write it without a word.
                    for buffer in module.buffers():
                        before.contents.keep(buffer)
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
    modules: dict[int, torch.nn.Module] = {}
    todo: list[torch.nn.Module] = [model]
    while todo:
        for module in followed(unwrapped(todo.pop())):
            if id(module) not in modules:
                modules[id(module)] = module
                if not isinstance(module, torch.jit.ScriptModule):
                    todo += _hidden(value for name, value in module.__dict__.items() if name not in _TABLES)
                    todo += (child for child in module._modules.values() if child is not None and unwrapped(child) is not child)
    return list(modules.values())


def _hidden(values: Iterable[Any], depth: int = 0) -> Iterator[torch.nn.Module]:
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield value
        elif depth < _DEEP and type(value) in {list, tuple, dict}:
            yield from _hidden(value.values() if type(value) is dict else value, depth + 1)


def _global_hooks() -> Iterator[dict[Any, Any]]:
    return (hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict))


def _put_modes(before: list[tuple[Any, bool]]) -> None:
    for part, training in before:
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


def _set_flags(stack: ExitStack) -> None:
    """Which the snapshot puts back; the fused kernel of attention is off, as it hides the parts from hooks."""
    # Nobody asked this run for warnings, and what torch says but once is still to be said when the user's own run says it.
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    torch.set_warn_always(True)
    sys.setrecursionlimit(2 * sys.getrecursionlimit())  # hooks and modes of ours stand between the frames of the user's
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
        if (original := getattr(library, "is_fake_tensor", None)) is not None:
            stack.callback(setattr, library, "is_fake_tensor", original)
            library.is_fake_tensor = lambda tensor: isinstance(tensor, FakeTensor) and fakes.value(tensor) is None
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        yield
