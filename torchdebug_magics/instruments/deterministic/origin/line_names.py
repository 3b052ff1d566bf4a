"""What a dotted name of the user's holds, and where that is kept; no code of the user's runs for the answer."""

from __future__ import annotations

import functools
import io
import re
import sys
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from torchdebug_magics.instruments.deterministic.origin.digests import Digests, is_random, is_users
from torchdebug_magics.instruments.deterministic.origin.line_steps import Activation, Place
from torchdebug_magics.instruments.deterministic.origin.nondeterminism_sources import global_generator
from torchdebug_magics.probing.attributes import attributes_of
from torchdebug_magics.probing.source.code_owner import is_of_module, is_user_code, local_values

_NOTHING: Any = object()
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")
"""In the text that Python makes of an object which knows no better."""
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class Namespace:
    """The names that a line can see."""

    def __init__(self, activation: Activation, frame: FrameType, digests: Digests) -> None:
        self._activation = activation
        self._global = frame.f_globals
        self._local = {} if is_of_module(frame) else local_values(frame)
        self._digests = digests

    def find(self, path: str) -> tuple[str, Any, Place] | None:
        """As much of the path as is a value of its own, that value and its place.

        None for what is not bound, and for functions and classes, which do not change, save what a `def` gave a parameter.
        """
        root, *parts = path.split(".")
        known, found = root, self._root(root)
        for part in parts:
            if found is None:
                return None
            further = self._part(found, part)
            if further is found:
                break
            known, found = f"{known}.{part}", further
        return None if found is None else _told(known, *found)

    def _root(self, name: str) -> tuple[Any, Place] | None:
        code = self._activation.code
        if name in self._local:
            if name in code.co_freevars or name in code.co_cellvars:
                return self._local[name], ("cell", code.co_filename, name)
            return self._local[name], ("local", self._activation, name)
        return (self._global[name], ("global", id(self._global), name)) if name in self._global else None

    def _part(self, found: tuple[Any, Place], name: str) -> tuple[Any, Place] | None:
        """The attribute; the object itself where it is asked for something that is no plain attribute."""
        value, _ = found
        if isinstance(value, ModuleType):
            held = vars(value)
            return (held[name], ("global", id(held), name)) if name in held else None
        if isinstance(value, torch.Tensor) or is_random(value) or type(value).__module__ == "numpy":
            return found
        part = _NOTHING if isinstance(value, type) else _own(value, name)
        if isinstance(part, FunctionType) and not is_user_code(part.__code__):  # as a scheduler puts one over an optimizer's `step`
            return found
        if part is not _NOTHING:
            return part, ("attribute", *self._digests.token(value), name)
        return self._of_class(found, name)

    def _of_class(self, found: tuple[Any, Place], name: str) -> tuple[Any, Place] | None:
        value, _ = found
        kind = value if isinstance(value, type) else type(value)
        for base in kind.__mro__:
            if name in vars(base):
                part = vars(base)[name]
                if isinstance(part, MemberDescriptorType) and not isinstance(value, type):
                    try:
                        return part.__get__(value), ("attribute", *self._digests.token(value), name)
                    except AttributeError:
                        return None
                if is_users(base):
                    is_code = isinstance(part, (FunctionType, property, classmethod, staticmethod))
                    return None if is_code else (part, ("attribute", base.__qualname__, 0, name))
                return None if isinstance(value, type) else found
        return None


def _own(value: Any, name: str) -> Any:
    held = attributes_of(value) or {}
    if name in held:
        return held[name]
    if isinstance(value, torch.nn.Module):
        return next((held[table][name] for table in _MODULE_TABLES if name in held.get(table, ())), _NOTHING)
    return _NOTHING


def _told(path: str, value: Any, place: Place) -> tuple[str, Any, Place] | None:
    """A function that belongs to an object stands for that object."""
    called, generator = global_generator(value)
    if generator is not None:
        return called or path.rpartition(".")[0] or path, generator, ("random", id(generator))
    if isinstance(value, (MethodType, BuiltinMethodType)):
        holder = path.rpartition(".")[0] or path
        if is_random(value.__self__):
            return holder, value.__self__, ("random", id(value.__self__))
        is_users_own = isinstance(value, MethodType) and is_user_code(getattr(value.__func__, "__code__", _NO_CODE))
        return None if is_users_own or isinstance(value.__self__, (ModuleType, type)) else (path, value.__self__, place)
    if is_random(value):
        return path, value, ("random", id(value))
    if isinstance(value, FunctionType) and (value.__defaults__ or value.__kwdefaults__) and is_user_code(value.__code__):
        return path, value, place
    return None if isinstance(value, (FunctionType, type, ModuleType)) else (path, value, place)


_NO_CODE: CodeType = Namespace.__init__.__code__


def fact(value: Any) -> str:  # noqa: PLR0911 - a list of kinds, each with its own word
    """What the way to the repair depends on, in a word; empty for most values."""
    if isinstance(value, (set, frozenset)):
        return "set"
    if isinstance(value, str):
        return "address" if _ADDRESS.search(value) else ""
    if isinstance(value, functools._lru_cache_wrapper):
        return "cache"
    if isinstance(value, (io.IOBase, io.TextIOWrapper)):
        return "file"
    loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", None)
    if loader is not None and isinstance(value, loader):
        return "workers" if value.num_workers else "loader"
    if type(value).__name__ == "_MultiProcessingDataLoaderIter":
        return "workers"
    if not is_random(value) and not isinstance(value, torch.Tensor) and hasattr(type(value), "__next__"):
        return "iterator"
    return ""
