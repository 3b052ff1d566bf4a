"""What a step may write and is kept before it runs: buffers, and the places that its bytecode shows.

Bytecode is read once a function, so that it costs next to nothing for code that keeps no state.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.modules.batchnorm import _NormBase

from torchdebug_magics.probing.source.syntax import names_in
from torchdebug_magics.probing.source.user_code import called_from, is_of_module, is_user_code, local_values, writes_of
from torchdebug_magics.probing.state.attributes import Names, attributes_of
from torchdebug_magics.probing.state.contents import Kept, each_element_once
from torchdebug_magics.probing.state.states import is_generator

Namespace: TypeAlias = Names | CellType
_SMALL_COUNT = 1 << 16
"""Copying so few numbers takes no longer than a few ops."""
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


def places_of(modules: Iterable[torch.nn.Module], callers: Iterable[FrameType] = ()) -> list[Namespace]:
    """The places that forwards of `modules`, and functions named in the code of `callers`, may write, as far as their code shows.

    With the generators of random numbers that `callers` name: who draws from one writes it.
    """
    found, callers = _Found(), list(callers)
    drawn = dict(enumerate(generator for caller in callers for generator in _generators_of(caller)))
    found.add({str(number): generator for number, generator in drawn.items()}, map(str, drawn))
    functions = [
        value
        for caller in callers
        for name in writes_of(caller.f_code).loaded
        if isinstance(value := caller.f_globals.get(name), FunctionType)
    ]
    for module in modules:
        held_by = (value for kind in type(module).__mro__ for value in vars(kind).values())
        methods = [value for value in held_by if isinstance(value, FunctionType) and is_user_code(value.__code__)]
        functions += methods
        held = module.__dict__
        for method in methods:
            writes = writes_of(method.__code__)
            if method.__name__ != "__init__":
                found.add(held, writes.attributes)
            loaded = (writes.loaded_attributes & held.keys()) - _OF_EVERY_MODULE
            found.add(held, (name for name in loaded if _is_container(held[name]) or is_generator(held[name])))
    for function in functions:
        for called in called_from(function):
            found.add_outside(called)
    return found.places()


def iterators_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[str]:
    """Names of running iterators that functions called by the statements may take from: what they took would be lost."""
    found: list[str] = []
    for name in sorted(names_in(*statements)):
        for called in called_from(names.get(name)):
            held = called.__globals__
            loaded = writes_of(called.__code__).loaded & held.keys()
            found += [name for name in loaded if hasattr(type(held[name]), "__next__") and not hasattr(type(held[name]), "read")]
    return found


class _Found:
    """Places, each namespace once."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[dict[str, Any] | type, set[str]]] = {}
        self._cells: dict[int, CellType] = {}

    def add(self, owner: dict[str, Any] | type, names: Iterable[str]) -> None:
        self._names.setdefault(id(owner), (owner, set()))[1].update(names)

    def add_outside(self, function: FunctionType) -> None:
        """What one function writes outside itself: globals, what it closes over, containers that it names, attributes that it stores."""
        writes, names = writes_of(function.__code__), function.__globals__
        self.add(names, writes.stored_globals)
        self._cells.update((id(cell), cell) for cell in function.__closure__ or ())
        for name in writes.loaded & names.keys():
            value = names[name]
            if is_generator(value) or (_is_container(value) and value is not names):
                self.add(names, [name])
            elif isinstance(value, type):
                self.add(value, writes.attributes & vars(value).keys())
            elif not isinstance(value, (torch.Tensor, torch.nn.Module, ModuleType, FunctionType)):
                held = attributes_of(value) or {}
                self.add(held, writes.attributes & held.keys())

    def places(self) -> list[Namespace]:
        return [*(Names(owner, frozenset(names)) for owner, names in self._names.values() if names), *self._cells.values()]


def _generators_of(caller: FrameType) -> Iterator[object]:
    """In variables, and in attributes of what is in variables."""
    names = caller.f_globals
    local = {} if is_of_module(caller) else local_values(caller)
    for value in (*local.values(), *(names[name] for name in writes_of(caller.f_code).loaded & names.keys())):
        held = {} if issubclass(type(value), (type, ModuleType, FunctionType)) else attributes_of(value) or {}
        yield from filter(is_generator, (value, *held.values()))


def _is_container(value: object) -> bool:
    return issubclass(type(value), (list, dict, set, deque))


class Held(NamedTuple):
    """A buffer at one moment."""

    names: dict[str, torch.Tensor | None]
    name: str
    kept: Kept

    def put_back(self) -> None:
        """Make it hold what it held."""
        self.kept.put_back()
        self.names[self.name] = self.kept.tensor


class BufferKeeper:
    """Takes the buffers of some modules again and again, copying only what can have changed.

    Batch norm writes its running statistics without a version bump, and so does whoever writes through ``.data``: a buffer is always
    copied. Only a large one (a causal mask, say) that is none of batch norm's is copied again only when its version moved.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._tables = [(module._buffers, isinstance(module, _NormBase)) for module in modules if module._buffers]
        self._large: dict[tuple[int, str], Kept] = {}

    def take(self) -> list[Held]:
        """The buffers as they are now."""
        with torch.no_grad() if self._tables else nullcontext():
            return [
                Held(names, name, self._kept(names, name, buffer, always=is_norm))
                for names, is_norm in self._tables
                for name, buffer in names.items()
                if buffer is not None and not buffer.is_meta
            ]

    def _kept(self, names: dict[str, torch.Tensor | None], name: str, buffer: torch.Tensor, *, always: bool) -> Kept:
        if always or buffer.is_inference() or each_element_once(buffer).numel() <= _SMALL_COUNT:
            return Kept.of(buffer)
        known = self._large.get((id(names), name))
        if known is None or known.tensor is not buffer or known.version != buffer._version:
            known = self._large[id(names), name] = Kept.of(buffer)
        return known
