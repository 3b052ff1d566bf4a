"""What the user calls a tensor: a variable, an argument of the model, a parameter.

Asks the types of what is in variables: an object of the user's may answer `isinstance` with an error.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from torchdebug_magics.instruments.nanhunt.rerun.step_recorder import Entry
from torchdebug_magics.probing.modules import live_modules, parts_of, unwrapped
from torchdebug_magics.probing.state.contents import memory_of
from torchdebug_magics.probing.tensors import is_traced

UNNAMED: Final = "a tensor from before the step"


def owner_of(tensor: torch.Tensor, roots: Iterable[torch.nn.Module]) -> tuple[str, str] | None:
    """("parameter" or "buffer", name as in `state_dict`) of what holds these very numbers; a view of it counts."""
    for root in roots:
        for kind, members in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
            for name, member in members:
                if shares_memory(member, tensor):
                    return kind, name
    return None


def parameter_name(parameter: torch.Tensor, roots: Iterable[torch.nn.Module]) -> str:
    """As in `state_dict`; empty for what is no parameter of these."""
    return next((name for root in roots for name, one in root.named_parameters() if one is parameter), "")


def variable_name(tensor: torch.Tensor, variables: Mapping[str, Any], entries: Iterable[Entry]) -> str:
    """The variable that is the tensor, or the model's argument, or one that holds it in its memory."""
    named: list[tuple[str, Any]] = [(name, value) for name, value in variables.items() if not name.startswith("_")]
    given: list[tuple[str, Any]] = [argument for entry in entries for argument in _arguments(entry).items()]
    tests: tuple[Callable[[Any, Any], bool], ...] = (operator.is_, shares_memory)
    for same in tests:
        for candidates in (named, given):
            for name, value in candidates:
                if issubclass(type(value), torch.Tensor) and same(value, tensor):
                    return name
            for name, value in candidates:
                if inner := _inside(value, tensor, same):
                    return f"{name}{inner}"
    return UNNAMED


def uncalled(values: Iterable[Any], roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules among `values` that are no part of others: one whose parameters alone are used is never called."""
    found = {id(module): module for module in (unwrapped(value) for value in values if issubclass(type(value), torch.nn.Module))}
    inside = {id(part) for root in roots for part in root.modules()}
    inside |= {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for key, module in found.items() if key not in inside]


def name_in_a_model(tensor: torch.Tensor) -> str:
    """The key in the `state_dict` of the model, of all that are alive, that holds it; empty where none does."""
    modules = list(live_modules())
    inner = parts_of(modules)
    owner = owner_of(tensor, [module for module in modules if id(module) not in inner])
    return "" if owner is None else owner[1]


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are the same tensor or views of the same numbers; never an error, whatever kinds they are."""
    if one is other:
        return True
    if one.dtype is not other.dtype or is_traced(one) or is_traced(other):
        return False
    return memory_of(one) == memory_of(other) != 0


def _inside(value: Any, tensor: torch.Tensor, same: Any) -> str:
    """``["x"]`` or ``[0]`` where a small container holds it."""
    if not issubclass(type(value), (Mapping, list, tuple)) or len(value) > 64:  # noqa: PLR2004 - a batch, not a data set
        return ""
    items: Iterable[tuple[Any, Any]] = value.items() if issubclass(type(value), Mapping) else enumerate(value)
    return next((f"[{key!r}]" for key, held in items if issubclass(type(held), torch.Tensor) and same(held, tensor)), "")


def _arguments(entry: Entry) -> Mapping[str, Any]:
    try:
        return inspect.signature(unwrapped(entry.module).forward).bind(*entry.args, **entry.kwargs).arguments
    except (TypeError, ValueError):
        return {f"argument {place}": value for place, value in enumerate(entry.args)} | entry.kwargs
