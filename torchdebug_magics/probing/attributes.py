"""Names bound to objects: attributes of instances, classes and modules, and what functions hold; as they are now, and back again.

No code of the objects' own runs for that: attributes are read from where they are kept, never asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, TypeAlias

from torchdebug_magics.probing.where import is_user_code, owner

__all__ = ["Kept", "PutBack", "keep_cell", "keep_class", "keep_function", "keep_instance", "keep_module"]

PutBack: TypeAlias = Callable[[], object]
Kept: TypeAlias = tuple[Iterable[object], PutBack | None]
"""What an object leads to, and what puts it back; None where nothing of it can change."""

_ABSENT = object()
_HEAP_TYPE = 1 << 9
"""The flag of a class that was made by a `class` statement."""
_SHARED = ("_thread", "threading", "multiprocessing", "concurrent", "asyncio", "_socket", "socket", "selectors")
"""Where the types of locks, threads and connections are from."""


def _namespace(names: dict[str, Any], only: Iterable[str] | None = None) -> PutBack:
    """Bindings, each for itself: the dict of an instance or a module is never empty in between."""
    before = dict(names) if only is None else {name: names.get(name, _ABSENT) for name in only}

    def put_back() -> None:
        for name in names.keys() - before.keys() if only is None else ():
            del names[name]
        for name, value in before.items():
            if value is _ABSENT:
                names.pop(name, None)
            elif names.get(name, _ABSENT) is not value:
                names[name] = value

    return put_back


def keep_instance(value: Any) -> Kept:
    """Attributes; but an object that holds a lock, a thread or a connection is left alone: it changes under other hands, too."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        found = None
    held = found if isinstance(found, dict) else {}
    slots = [(member, _slot_value(member, value)) for member in _members(type(value))]
    leads = [*list(held.values()), *(content for _, content in slots), type(value)]
    if any(type(content).__module__.partition(".")[0] in _SHARED for content in leads):
        return (), None
    actions: list[PutBack] = [_namespace(held)] if held is found else []
    actions += [functools.partial(_write_slot, member, value, content) for member, content in slots]
    return leads, (lambda: [action() for action in actions]) if actions else None


def _members(kind: type) -> tuple[MemberDescriptorType, ...]:
    """The `__slots__` of a class that was made in Python."""
    return tuple(
        member
        for one in kind.__mro__
        if one.__flags__ & _HEAP_TYPE and "__slots__" in vars(one)
        for member in vars(one).values()
        if isinstance(member, MemberDescriptorType)
    )


def _slot_value(member: MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return _ABSENT


def _write_slot(member: MemberDescriptorType, value: Any, content: Any) -> None:
    if content is not _ABSENT and _slot_value(member, value) is not content:
        member.__set__(value, content)


def keep_class(kind: type) -> Kept:
    """A class of the user's: counters and registries among its attributes, and what its methods lead to."""
    module = sys.modules.get(kind.__module__)
    if not kind.__flags__ & _HEAP_TYPE or owner(getattr(module, "__file__", None) or "") != "user":
        return (), None
    before = {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    def put_back() -> None:
        for name in [name for name in vars(kind) if name not in before and not name.startswith("__")]:
            type.__delattr__(kind, name)
        for name, value in before.items():
            if vars(kind).get(name, _ABSENT) is not value:
                type.__setattr__(kind, name, value)

    return [*vars(kind).values(), *kind.__mro__[1:]], put_back


def keep_module(module: ModuleType) -> Kept:
    """A module of the user's; what is installed is nobody's state."""
    file = vars(module).get("__file__")
    is_users = isinstance(file, str) and owner(file) == "user"
    return (list(vars(module).values()), _namespace(vars(module))) if is_users else ((), None)


def keep_cell(cell: CellType) -> Kept:
    """A variable that functions share."""
    try:
        content = cell.cell_contents
    except ValueError:
        return (), None
    return [content], lambda: setattr(cell, "cell_contents", content)


def keep_function(function: FunctionType) -> Kept:
    """What it closes over; of the user's own, the globals that it names."""
    leads = [*(function.__closure__ or ()), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), vars(function)]
    if not is_user_code(function.__code__):
        return leads, None
    names = _names(function.__code__)
    held = function.__globals__
    return [*leads, *(held[name] for name in names if name in held)], _namespace(held, names)


@functools.lru_cache(maxsize=2048)
def _names(code: CodeType) -> frozenset[str]:
    """The globals that a function may read or write, among other names."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)
