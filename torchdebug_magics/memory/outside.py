"""What a walk over holders never enters: plain values, modules, the machinery of the notebook, and ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, ModuleType
from typing import Any, TypeVar

import torch

from torchdebug_magics.probing.source.user_code import owner
from torchdebug_magics.probing.state.attributes import HEAP_TYPE
from torchdebug_magics.probing.state.kinds import LEAVES

_LEAVES = LEAVES | {CodeType, ModuleType, bytearray, torch.Generator}
_MACHINERY = frozenset({"IPython", "ipykernel", "traitlets", "zmq", "tornado", "jupyter_client", "comm", "torchdebug_magics", "_pytest"})
"""Whoever holds a shell, a socket or a session of ours holds, by way of it, everything."""
_LOOPS = ("asyncio.base_", "asyncio.events", "asyncio.unix_", "asyncio.windows_", "asyncio.selector_", "asyncio.proactor_")
T = TypeVar("T")

# Read from `type` itself, and types compared by identity: a metaclass may have methods and properties of its own.
bases: Any = type.__dict__["__mro__"].__get__
names_of_type: Any = type.__dict__["__dict__"].__get__
_flags: Any = type.__dict__["__flags__"].__get__
_MODULE_SPACE: Any = names_of_type(ModuleType)["__dict__"]


def is_a(kind: type, base: type) -> bool:
    """Whether a type is another one or derives from it, by its bases alone."""
    return type.__subclasscheck__(base, kind)


def of_type(table: Mapping[type, T], kind: type) -> T | None:
    """What is in a table under that very type."""
    return next((found for key, found in table.items() if key is kind), None)


def module_of(kind: type) -> str:
    """The name of the module that a type is from; empty where it says something else."""
    name = names_of_type(kind).get("__module__") if _flags(kind) & HEAP_TYPE else type.__dict__["__module__"].__get__(kind)
    return name if isinstance(name, str) else ""


def is_machinery(module: str) -> bool:
    """Whether it is of the notebook's machinery, or ours."""
    return module.partition(".")[0] in _MACHINERY or module.startswith(_LOOPS)


def is_outside(kind: type) -> bool:
    """Whether objects of this type are passed by."""
    return (
        any(kind is leaf for leaf in _LEAVES) or is_a(kind, ModuleType) or (is_machinery(module_of(kind)) and not is_a(kind, BaseException))
    )


def space_of(module: object) -> dict[str, Any]:
    """The globals of a module, without a `__getattr__` of a lazy one; nothing of what is no module."""
    held = _MODULE_SPACE.__get__(module) if is_a(type(module), ModuleType) else None
    return held if isinstance(held, dict) else {}


def whose_module(name: str) -> str:
    """``"user"`` for a module, by name, that was not installed; else whose it is."""
    top = name.partition(".")[0]
    if top == "__main__":
        return "user"
    if top in sys.stdlib_module_names:
        return "python"
    # One that is made by its package, as many of torch's are, has no file of its own.
    files = (space_of(sys.modules.get(one)).get("__file__") for one in (name, top))
    file = next((file for file in files if isinstance(file, str)), None)
    return owner(file) if isinstance(file, str) else "user"
