"""Plain Python state that a step's code writes: counters on modules, globals, closures and small containers.

Which names are written is read from the bytecode, once a function, so that taking the state costs next to nothing for code that keeps
none. Tensors are held weakly: the state must not keep an activation alive.
"""

from __future__ import annotations

import ast
import dis
import functools
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from torchdebug_magics.probing.where import is_user_code

__all__ = ["PythonState", "Slot", "iterators_in", "slots_in", "slots_of"]

_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)
_MOST_ITEMS = 256
_MOST_FUNCTIONS = 200
_MOST_NUMBERS = 1 << 24


@dataclass(frozen=True)
class Slot:
    """One place that may be written: `read` gives what must be kept to `write` it back."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class PythonState:
    """What a list of slots held at one moment."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._held = [(slot, slot.read()) for slot in slots]

    @property
    def slots(self) -> list[Slot]:
        """The places, to take their present state."""
        return [slot for slot, _ in self._held]

    def put_back(self) -> None:
        """Write every slot as it was; one that cannot be written is left."""
        for slot, value in self._held:
            slot.write(value)


@dataclass(frozen=True)
class _Writes:
    attributes: frozenset[str]
    stored_globals: frozenset[str]
    loaded: frozenset[str]
    loaded_attributes: frozenset[str]


@functools.lru_cache(maxsize=2048)
def _writes(code: CodeType) -> _Writes:
    attributes, stored, loaded, loaded_attributes = set(), set(), set(), set()
    for instruction in dis.get_instructions(code):
        match instruction.opname:
            case "STORE_ATTR":
                attributes.add(instruction.argval)
            case "STORE_GLOBAL":
                stored.add(instruction.argval)
            case "LOAD_GLOBAL" | "LOAD_NAME":
                loaded.add(instruction.argval)
            case "LOAD_ATTR" | "LOAD_METHOD":
                loaded_attributes.add(instruction.argval)
            case _:
                pass
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _writes(constant)
            attributes |= inner.attributes
            stored |= inner.stored_globals
            loaded |= inner.loaded
            loaded_attributes |= inner.loaded_attributes
    return _Writes(frozenset(attributes), frozenset(stored), frozenset(loaded), frozenset(loaded_attributes))


def slots_of(modules: Iterable[torch.nn.Module], callers: Iterable[FrameType] = ()) -> list[Slot]:
    """The places that forwards of `modules`, and functions named in the code of `callers`, may write, as far as their code shows."""
    found: dict[tuple[int, object], Slot] = {}
    todo = [
        value
        for caller in callers
        for name in _writes(caller.f_code).loaded
        if isinstance(value := caller.f_globals.get(name), FunctionType)
    ]
    for module in modules:
        methods = _methods(type(module))
        todo += methods
        stored = frozenset().union(*(_writes(method.__code__).attributes for method in methods if method.__name__ != "__init__"))
        loaded = frozenset().union(*(_writes(method.__code__).loaded_attributes for method in methods))
        _add_attributes(found, module, stored, loaded)
    for function in todo:
        _add_called(found, function)
    return list(found.values())


def _methods(kind: type) -> list[FunctionType]:
    return [
        method
        for one in kind.__mro__
        for method in vars(one).values()
        if isinstance(method, FunctionType) and is_user_code(method.__code__)
    ]


def _add_function(found: dict[tuple[int, object], Slot], function: FunctionType) -> list[FunctionType]:
    """Slots of what one function writes outside itself; the user's functions that it calls by name."""
    writes, names = _writes(function.__code__), function.__globals__
    for name in writes.stored_globals:
        found.setdefault((id(names), name), _item_slot(names, name))
    _add_closure(found, function)
    called = []
    for name in writes.loaded & names.keys():
        value = names[name]
        if isinstance(value, FunctionType):
            called.append(value)
        elif type(value) in _CONTAINERS:
            if len(value) <= _MOST_ITEMS:
                found.setdefault((id(value), "items"), _container_slot(value))
        elif isinstance(value, type):
            for attribute in writes.attributes & vars(value).keys():
                found.setdefault((id(value), attribute), _attribute_slot(value, attribute))
        elif not isinstance(value, (torch.Tensor, torch.nn.Module, ModuleType)):
            _add_attributes(found, value, writes.attributes, frozenset())
    return called


def _add_closure(found: dict[tuple[int, object], Slot], function: FunctionType) -> None:
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=False):
        found.setdefault((id(cell), name), _cell_slot(cell))
        held = _contents(cell)
        if type(held) in _CONTAINERS and len(held) <= _MOST_ITEMS:
            found.setdefault((id(held), "items"), _container_slot(held))


def _add_attributes(found: dict[tuple[int, object], Slot], owner: Any, stored: frozenset[str], loaded: frozenset[str]) -> None:
    held = getattr(owner, "__dict__", None)
    if not isinstance(held, dict):
        return
    for name in stored:
        if name in held or isinstance(owner, torch.nn.Module):
            found.setdefault((id(owner), name), _item_slot(held, name))
    for name in loaded & held.keys():
        value = held[name]
        if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS and name not in torch.nn.Module().__dict__:
            found.setdefault((id(value), "items"), _container_slot(value))


_ABSENT = object()


def _item_slot(names: dict[str, Any], name: str) -> Slot:
    def write(value: Any) -> None:
        if value is _ABSENT:
            names.pop(name, None)
        elif (kept := _awake(value)) is not _ABSENT:
            names[name] = kept

    return Slot(lambda: _asleep(names.get(name, _ABSENT)), write)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attribute_slot(owner: Any, name: str) -> Slot:
    def write(value: Any) -> None:
        kept = _awake(value)
        if kept is not _ABSENT:
            setattr(owner, name, kept)

    return Slot(lambda: _asleep(vars(owner).get(name, _ABSENT)), write)


def _cell_slot(cell: Any) -> Slot:
    def read() -> Any:
        try:
            return _asleep(cell.cell_contents)
        except ValueError:
            return _ABSENT

    def write(value: Any) -> None:
        kept = _awake(value)
        if kept is not _ABSENT:
            cell.cell_contents = kept

    return Slot(read, write)


def _container_slot(container: Any) -> Slot:
    def write(items: list[Any]) -> None:
        now = read()
        if len(now) == len(items) and all(_same(one, other) for one, other in zip(now, items, strict=True)):
            return
        awake = [_awake(item) for item in items]
        if any(item is _ABSENT or (isinstance(item, tuple) and any(part is _ABSENT for part in item)) for item in awake):
            return
        container.clear()
        if isinstance(container, dict):
            for key, item in awake:  # not `update`: a Counter would count the pairs
                container[key] = item
        elif isinstance(container, set):
            container.update(awake)
        else:
            container.extend(awake)

    def read() -> list[Any]:
        return [_asleep(item) for item in (container.items() if isinstance(container, dict) else container)]

    return Slot(read, write)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(left is right for left, right in zip(one, other, strict=True))
    return one is other


def _asleep(value: Any) -> Any:
    """Tensors as weak references, also inside the pairs of a dict."""
    if isinstance(value, torch.Tensor):
        return weakref.ref(value)
    if isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(_asleep(item) for item in value)
    return value


def _awake(value: Any) -> Any:
    if isinstance(value, weakref.ref):
        alive = value()
        return _ABSENT if alive is None else alive
    if isinstance(value, tuple):
        return tuple(_awake(item) for item in value)
    return value


def slots_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[Slot]:
    """The containers, attributes and items that statements may write, with `names` as their variables. Asks no property."""
    found: dict[tuple[int, object], Slot] = {}
    for node in (node for statement in statements for node in ast.walk(statement)):
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        value = _value_of(node, names)
        if isinstance(value, FunctionType) and is_user_code(value.__code__):
            _add_called(found, value)
        if type(value) in _CONTAINERS and value is not names:
            found.setdefault((id(value), "items"), _container_slot(value))
        slot = _value_slot(value)
        if slot is not None:
            found.setdefault((id(value), "value"), slot)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            held = getattr(_value_of(node.value, names), "__dict__", None)
            if isinstance(held, dict):
                found.setdefault((id(held), node.attr), _item_slot(held, node.attr))
    return list(found.values())


def iterators_in(names: Mapping[str, Any], statements: Iterable[ast.stmt]) -> list[str]:
    """Names of running iterators that functions called by the statements may take from: what they took would be lost."""
    found: list[str] = []
    for node in (node for statement in statements for node in ast.walk(statement)):
        value = names.get(node.id) if isinstance(node, ast.Name) else None
        todo = [value] if isinstance(value, FunctionType) else []
        seen: set[int] = set()
        while todo and len(seen) < _MOST_FUNCTIONS:
            function = todo.pop()
            if id(function.__code__) in seen or not is_user_code(function.__code__):
                continue
            seen.add(id(function.__code__))
            for name in _writes(function.__code__).loaded & function.__globals__.keys():
                held = function.__globals__[name]
                if isinstance(held, FunctionType):
                    todo.append(held)
                elif hasattr(type(held), "__next__") and not hasattr(type(held), "read"):
                    found.append(name)
    return found


def _value_slot(value: Any) -> Slot | None:
    """What a statement can change in place inside an object: numbers of a plain tensor or array, the state of a generator."""
    kind = type(value)
    if isinstance(value, torch.Generator):
        return Slot(value.get_state, lambda state: _ignore(value.set_state(state)))
    if isinstance(value, random.Random):
        return Slot(value.getstate, value.setstate)
    if kind is torch.Tensor and value.is_leaf and not value.requires_grad and value.layout is torch.strided and not value.is_meta:
        return _tensor_slot(value) if value.numel() <= _MOST_NUMBERS and not value.is_nested and not value.is_inference() else None
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return (
            Slot(value.copy, lambda copy: value.__setitem__(..., copy)) if value.size <= _MOST_NUMBERS and value.flags.writeable else None
        )
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "Generator":
        return Slot(lambda: value.bit_generator.state, lambda state: setattr(value.bit_generator, "state", state))
    return None


def _ignore(_result: object) -> None:
    """For a setter that returns something."""


def _tensor_slot(tensor: torch.Tensor) -> Slot:
    def write(held: tuple[int, torch.Tensor]) -> None:
        version, copy = held
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(copy)

    return Slot(lambda: (tensor._version, tensor.detach().clone()), write)


def _add_called(found: dict[tuple[int, object], Slot], function: FunctionType) -> None:
    """What a function that is called writes, and the user's functions that it calls."""
    todo, seen = [function], set[int]()
    while todo and len(seen) < _MOST_FUNCTIONS:
        one = todo.pop()
        if id(one.__code__) not in seen and is_user_code(one.__code__):
            seen.add(id(one.__code__))
            todo += _add_function(found, one)


def _value_of(node: ast.AST, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        held = getattr(_value_of(node.value, names), "__dict__", None)
        return held.get(node.attr) if isinstance(held, dict) else None
    return None
