"""Names bound to objects: attributes of instances, classes and modules, and what functions hold.

They are read from where they are kept, never asked for: no property, no `__getattr__` of the user's runs.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from types import CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch

from torchdebug_magics.probing.source.user_code import Owner, is_user_code, owner, runs_alone, writes_of
from torchdebug_magics.probing.state.kinds import ABSENT, GONE, Kind, same

HEAP_TYPE = 1 << 9
"""A flag of types that were made by a `class` statement, or could have been."""
_SHARED = frozenset({"_thread", "threading", "multiprocessing", "concurrent", "asyncio", "_socket", "socket", "selectors"})
"""Where the types of locks, threads and connections are from."""


@dataclass(frozen=True, eq=False)
class Names:
    """Some of the names in a namespace, or in a class."""

    owner: dict[str, Any] | type
    names: frozenset[str]


def attributes_of(value: object) -> dict[str, Any] | None:
    """Its own attributes. A `__dict__` that is a property of the user's is not asked."""
    if type(value) is local:
        return vars(value)  # of this thread; its class has no such entry
    for base in type(value).__mro__:
        if "__dict__" in vars(base):
            getter = vars(base)["__dict__"]
            attributes = getter.__get__(value) if type(getter) in {GetSetDescriptorType, MemberDescriptorType} else None
            return attributes if isinstance(attributes, dict) else None
    return None


def members_of(kind: type) -> list[MemberDescriptorType]:
    """The `__slots__` of a class that was made in Python, in the order of its bases."""
    return [
        member
        for base in kind.__mro__
        if base.__flags__ & HEAP_TYPE and "__slots__" in vars(base)
        for member in vars(base).values()
        if type(member) is MemberDescriptorType
    ]


# --- bindings, each for itself: a namespace is never empty in between -----------------------------------------------------------


def _read_names(names: Any, only: Iterable[str]) -> list[Any]:
    return [part for name in only for part in (name, names.get(name, ABSENT))]


def _write_names(target: Any, names: Any, parts: list[Any]) -> None:
    for name, value in zip(parts[::2], parts[1::2], strict=True):
        present = names.get(name, ABSENT)
        if value is GONE or value is present:
            continue
        if not isinstance(target, type):
            target.pop(name) if value is ABSENT else target.update({name: value})
        elif value is ABSENT:
            type.__delattr__(target, name)
        else:
            type.__setattr__(target, name, value)


def _write_all(target: Any, names: Any, present: Iterable[str], parts: list[Any]) -> None:
    new = set(present) - set(parts[::2])
    _write_names(target, names, [*(part for name in new for part in (name, ABSENT)), *parts])


def _namespace(owner: dict[str, Any] | type) -> Any:
    return vars(owner) if isinstance(owner, type) else owner


def _write_namespace(namespace: dict[str, Any], parts: list[Any]) -> None:
    if not same(_read_names(namespace, list(namespace)), parts):
        _write_all(namespace, namespace, list(namespace), parts)


# --- instances: a dict, and what `__slots__` names -------------------------------------------------------------------------------


def _read_instance(value: object) -> list[Any] | None:
    """An object that holds a lock, a thread or a connection may change under other hands, too: then it is left alone.

    One that wraps a file, as an open archive does, goes with the file, which is put back where it stood.
    """
    attributes = attributes_of(value) or {}
    parts = [*(_read_member(member, value) for member in members_of(type(value))), *_read_names(attributes, list(attributes))]
    kinds = {id(kind): kind for kind in map(type, parts)}.values()  # each once, without a call of a metaclass's `__hash__`
    is_shared = any(map(_is_shared, kinds)) and not _is_ours_alone(type(value)) and not _wraps_a_file(parts)
    return None if is_shared else parts


def _wraps_a_file(parts: list[Any]) -> bool:
    return any(issubclass(type(part), io.IOBase) for part in parts) and runs_alone()


def _is_shared(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in _SHARED


def _is_ours_alone(kind: type) -> bool:
    """Whether it is a class of the user's, and no other thread is in the user's code."""
    return whose(kind) == "user" and not any(map(_is_shared, kind.__mro__)) and runs_alone()


def _write_instance(value: object, parts: list[Any]) -> None:
    members, attributes = members_of(type(value)), attributes_of(value)
    for member, part in zip(members, parts, strict=False):
        if part is not GONE and part is not _read_member(member, value):
            member.__delete__(value) if part is ABSENT else member.__set__(value, part)
    if attributes is not None:
        _write_namespace(attributes, parts[len(members) :])


def _read_member(member: MemberDescriptorType, value: object) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return ABSENT


# --- classes, modules, functions: only the user's can change ---------------------------------------------------------------------


def _own_names(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("__")]


def _read_class(kind: type) -> list[Any] | None:
    """Counters and registries among its attributes, and what its methods lead to."""
    return _read_names(vars(kind), _own_names(kind)) if whose(kind) == "user" else None


def whose(kind: type) -> Owner:
    """Whose class it is: Python's where no `class` statement has made it, the user's where no file has."""
    name = kind.__module__
    if name == "__main__":
        return "user"
    if not isinstance(name, str) or not kind.__flags__ & HEAP_TYPE:
        return "python"
    if name.partition(".")[0] in sys.stdlib_module_names and name != "builtins":
        return "python"
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    return owner(file) if isinstance(file, str) else "user"


def _read_module(module: ModuleType) -> list[Any] | None:
    names = vars(module)
    file = names.get("__file__")
    return _read_names(names, list(names)) if isinstance(file, str) and owner(file) == "user" else None


def _read_function(function: FunctionType) -> list[Any]:
    """The globals that a function of the user's own names."""
    if not is_user_code(function.__code__):
        return []
    writes = writes_of(function.__code__)
    return _read_names(function.__globals__, writes.loaded | writes.stored_globals)


def _around(function: FunctionType) -> Iterable[object]:
    """What it closes over, its defaults and its attributes."""
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield vars(function)


def _read_cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was bound to it so far
        return [ABSENT]


def _write_cell(cell: CellType, parts: list[Any]) -> None:
    if parts[0] is ABSENT:
        del cell.cell_contents
    elif parts[0] is not GONE:
        cell.cell_contents = parts[0]


NAMES = Kind(
    lambda place: _read_names(_namespace(place.owner), place.names),
    lambda place, parts: _write_names(place.owner, _namespace(place.owner), parts),
)
INSTANCE = Kind(_read_instance, _write_instance, also=lambda value: [type(value)])
CLASS = Kind(
    _read_class,
    lambda kind, parts: _write_all(kind, vars(kind), _own_names(kind), parts),
    also=lambda kind: [*vars(kind).values(), *kind.__mro__[1:]],
)
MODULE = Kind(_read_module, lambda module, parts: _write_namespace(vars(module), parts))
FUNCTION = Kind(_read_function, lambda function, parts: _write_names(function.__globals__, function.__globals__, parts), also=_around)
CELL = Kind(_read_cell, _write_cell)


def referents(*objects: object) -> list[object]:
    """The direct referents of `objects`. Those of a module are its namespace alone.

    `gc.get_referents` also returns what a C module keeps in its state. `_asyncio` keeps a list of freed iterators there, from
    Python 3.12 on: a reference to one frees it a second time, and the list then has no end.
    """
    modules = [module for module in objects if type(module) is ModuleType]
    if not modules:
        return gc.get_referents(*objects)
    others = (value for value in objects if type(value) is not ModuleType)
    return [*gc.get_referents(*others), *map(vars, modules)]


@contextmanager
def undisturbed() -> Iterator[None]:
    """No collection in between, which would run finalizers; no function of a tensor subclass."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch._C.DisableTorchFunctionSubclass():
            yield
    finally:
        if was_enabled:
            gc.enable()
