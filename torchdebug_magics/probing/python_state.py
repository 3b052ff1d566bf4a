"""Plain Python state that a step's code writes: counters on modules, globals, closures, containers and the user's own objects.

Which names are written is read from the bytecode, once a function, so that taking the state costs next to nothing for code that keeps
none.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from torchdebug_magics.probing.kinds import attributes_of
from torchdebug_magics.probing.plain import kinds_of
from torchdebug_magics.probing.slots import PythonState, Slot, cell_slot, class_slot, contents_slot, item_slot, numbers_slot
from torchdebug_magics.probing.where import is_user_code
from torchdebug_magics.probing.written import called_from, writes_of

__all__ = ["PythonState", "Slot", "iterators_in", "slots_in", "slots_of"]

_MOST_ITEMS = 256
"""Of what is kept at each step; far more is kept when a step is run again."""
_MOST_ITEMS_ONCE = 1 << 20
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)
_Found: TypeAlias = dict[tuple[int, str], Slot]


def slots_of(modules: Iterable[torch.nn.Module], callers: Iterable[FrameType] = ()) -> list[Slot]:
    """The places that forwards of `modules`, and functions named in the code of `callers`, may write, as far as their code shows."""
    found: _Found = {}
    functions = [
        value
        for caller in callers
        for name in writes_of(caller.f_code).loaded
        if isinstance(value := caller.f_globals.get(name), FunctionType)
    ]
    for module in modules:
        methods = _methods(type(module))
        functions += methods
        stored = frozenset().union(*(writes_of(method.__code__).attributes for method in methods if method.__name__ != "__init__"))
        loaded = frozenset().union(*(writes_of(method.__code__).loaded_attributes for method in methods))
        held = module.__dict__
        _add(found, held, stored)
        _add(found, held, (name for name in (loaded & held.keys()) - _OF_EVERY_MODULE if _is_container(held[name])))
    for function in functions:
        for called in called_from(function):
            _add_outside(found, called, _is_container, _MOST_ITEMS)
    return list(found.values())


def slots_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[Slot]:
    """What statements may write, with `names` as their variables: in the objects that they name, and in functions that they call."""
    found: _Found = {}
    for node in _nodes(statements, (ast.Name, ast.Attribute)):
        value = _value_of(node, names)
        for called in called_from(_called_by(value)):
            _add_outside(found, called, kinds_of, _MOST_ITEMS_ONCE)
        if value is not names and kinds_of(value):
            found.setdefault((id(value), ""), _whole(value, _MOST_ITEMS_ONCE))
        elif (slot := numbers_slot(value)) is not None:
            found.setdefault((id(value), ""), slot)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            held = attributes_of(_value_of(node.value, names))
            if held is not None:
                found.setdefault((id(held), node.attr), item_slot(held, node.attr, most=_MOST_ITEMS_ONCE))
    return list(found.values())


def iterators_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[str]:
    """Names of running iterators that functions called by the statements may take from: what they took would be lost."""
    found: list[str] = []
    for node in _nodes(statements, (ast.Name,)):
        for called in called_from(_value_of(node, names)):
            held = called.__globals__
            loaded = writes_of(called.__code__).loaded & held.keys()
            found += [name for name in loaded if hasattr(type(held[name]), "__next__") and not hasattr(type(held[name]), "read")]
    return found


def _add(found: _Found, names: dict[str, Any], written: Iterable[str], most: int = _MOST_ITEMS) -> None:
    for name in written:
        found.setdefault((id(names), name), item_slot(names, name, most=most))


def _add_outside(found: _Found, function: FunctionType, is_kept: Callable[[object], object], most: int) -> None:
    """What one function writes outside itself; all that is in the globals that `is_kept`, of others the attributes that it stores."""
    writes, names = writes_of(function.__code__), function.__globals__
    _add(found, names, writes.stored_globals, most)
    for cell in function.__closure__ or ():
        found.setdefault((id(cell), ""), cell_slot(cell, most=most))
    for name in writes.loaded & names.keys():
        value = names[name]
        if value is not names and is_kept(value):
            found.setdefault((id(value), ""), _whole(value, most))
        elif isinstance(value, type):
            for attribute in writes.attributes & vars(value).keys():
                found.setdefault((id(value), attribute), class_slot(value, attribute, most=most))
        elif not isinstance(value, (torch.Tensor, torch.nn.Module, ModuleType, FunctionType)):
            held = attributes_of(value) or {}
            _add(found, held, writes.attributes & held.keys(), most)


def _methods(kind: type) -> list[FunctionType]:
    return [
        method
        for one in kind.__mro__
        for method in vars(one).values()
        if isinstance(method, FunctionType) and is_user_code(method.__code__)
    ]


def _is_container(value: object) -> bool:
    return issubclass(type(value), (list, dict, set, deque))


def _whole(value: object, most: int) -> Slot:
    return contents_slot(lambda: [value], most=most)


def _nodes(statements: Iterable[ast.stmt], kinds: tuple[type[ast.AST], ...]) -> Iterator[Any]:
    return (node for statement in statements for node in ast.walk(statement) if isinstance(node, kinds))


def _value_of(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """What an expression of names and attributes means; no property is asked."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, names)
        held = attributes_of(owner) or {}
        return held[node.attr] if node.attr in held else _method(owner, node.attr)
    return None


def _method(owner: object, name: str) -> FunctionType | None:
    found = next((vars(base)[name] for base in type(owner).__mro__ if name in vars(base)), None)
    return found if isinstance(found, FunctionType) else None


def _called_by(value: object) -> object:
    """The function that runs when it is called."""
    return value if isinstance(value, FunctionType) else _method(value, "__call__")
