"""Whether the code of a thread could get at an object: a thread that cannot will not end a wait for the object."""

from __future__ import annotations

import dis
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ref

from torchdebug_magics.probing.referents import referents
from torchdebug_magics.probing.source.call_sites import names_of
from torchdebug_magics.probing.source.code_owner import is_module_code, is_user_code, owner

__all__ = ["Reach", "is_kernels"]

_MOST_OBJECTS, _MOST_VISITS = 20_000, 100_000
_MOST_DEEP = 3
_MOST_ITEMS = 1_000
"""Of a container; one with more holds data."""
_PLAIN: tuple[type, ...] = (int, float, complex, str, bytes, bytearray, bool, type(None), range, CodeType, FrameType, ModuleType, ref)
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)
_DATA = frozenset({"torch", "torch._C", "torch.nn.parameter", "numpy", "pandas.core.frame", "pandas.core.series", "PIL.Image"})
_SHARED = ("multiprocessing.queues", "multiprocessing.connection", "multiprocessing.synchronize", "multiprocessing.managers")
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_KERNELS = ("IPython", "ipykernel", "jupyter", "tornado", "zmq", "traitlets", "debugpy", "pydevd", "_pydev")
"""They hold all of the user's names, which they do not use."""


class Reach:
    """All that the frames of one thread lead to: by local names, by global names that the user's functions use, and by what those hold."""

    def __init__(self, frames: Sequence[FrameType], others: Iterable[object] = ()) -> None:
        self._met: set[int] = set()
        self.shares = False
        """Whether a queue, a pipe or a lock between processes is met."""
        self._is_cut = False
        """Whether there was more than we looked at, so that nothing can be said."""
        self._runs_users = any(is_user_code(frame.f_code) for frame in frames)
        waiting: deque[Any] = deque(others)
        for frame in _without_kernel(frames):
            names = names_of(frame)
            self._is_cut |= not names and bool(frame.f_code.co_nlocals)
            if is_module_code(frame.f_code):
                waiting.extend(names[name] for name in _names_in(frame.f_code)[0] if name in names)
            else:
                waiting.extend(names.values())
                waiting.extend(_globals_of(frame.f_code, frame.f_globals))
        many = 0
        while waiting and not self._is_cut:
            self._go_on(waiting.popleft(), waiting)
            many += 1
            self._is_cut |= many > _MOST_VISITS or len(self._met) > _MOST_OBJECTS

    def can_get(self, wanted: object) -> bool:
        """Whether it could, as far as can be told; of a library's thread that leads to very much, only what was met counts."""
        return id(wanted) in self._met or (self._is_cut and self._runs_users)

    def _go_on(self, value: Any, waiting: deque[Any]) -> None:
        kind: Any = type(value)  # `isinstance` would ask the object, which may be the user's
        if issubclass(kind, _PLAIN) or id(value) in self._met:
            return
        self._met.add(id(value))
        self.shares |= str(kind.__module__).startswith(_SHARED)
        if issubclass(kind, FunctionType):
            waiting.extend(value.__closure__ or ())
            waiting.extend(value.__defaults__ or ())
            waiting.extend((value.__kwdefaults__ or {}).values())
            waiting.extend(_globals_of(value.__code__, value.__globals__))
        elif issubclass(kind, BuiltinFunctionType):
            waiting.append(value.__self__)  # of a bound method; of a plain function, its module
        elif issubclass(kind, type):
            bases = type.__dict__["__mro__"].__get__(value)
            waiting.extend(held for base in bases if _is_users(base) for held in tuple(vars(base).values()))
        elif issubclass(kind, (staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif issubclass(kind, property):
            waiting.extend((value.fget, value.fset))
        elif issubclass(kind, _CONTAINERS) and (many := _length_of(kind, value)) > _MOST_ITEMS:
            first = referents(value)[:1] if many < _MOST_VISITS else []
            self._is_cut |= not all(issubclass(type(one), (*_PLAIN, *_CONTAINERS)) or _is_data(one) for one in first)
        elif not _is_data(value):
            waiting.extend(referents(value))


def is_kernels(module: str) -> bool:
    """Whether it is code by which the kernel runs cells and talks to the front end."""
    return module.startswith(_KERNELS)


def _without_kernel(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """The frames of a cell, without those that run it; none of a thread of the kernel's own."""
    end = next((at for at, frame in enumerate(frames) if is_kernels(str(frame.f_globals.get("__name__")))), len(frames))
    return frames[:end] if end == len(frames) or any(is_user_code(frame.f_code) for frame in frames[:end]) else ()


def _globals_of(code: CodeType, space: dict[str, Any]) -> Iterator[Any]:
    """What the global names of a function of the user's stand for; a library's own functions are trusted to use what they are given."""
    used, attributes = _names_in(code) if is_user_code(code) else (frozenset[str](), frozenset[str]())
    for name in used:
        value = space.get(name)
        yield value
        if type(value) is ModuleType:
            yield from _of_module(value, attributes)


def _of_module(module: ModuleType, attributes: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """``module.name``, and ``module.inner.name``."""
    file = vars(module).get("__file__")
    if file and owner(file) == "user":
        for value in (vars(module).get(attribute) for attribute in attributes):
            yield value
            if type(value) is ModuleType and depth < _MOST_DEEP:
                yield from _of_module(value, attributes, depth + 1)


def _is_users(kind: type) -> bool:
    module = str(kind.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or module not in sys.modules or (file is not None and owner(file) == "user")


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(global names, attributes) that it uses, and the functions inside it."""
    found = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _LOADS}
    attributes = set(code.co_names) - found
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names, more = _names_in(inner)
            found |= names
            attributes |= more
    return frozenset(found), frozenset(attributes)


def _is_data(value: Any) -> bool:
    """Whether a value leads to no lock or queue: data, or the names of a whole module."""
    kind: Any = type(value)
    if kind is dict and "__builtins__" in value and "__name__" in value:
        return True
    return str(kind.__module__) in _DATA


def _length_of(kind: type, value: Any) -> int:
    """Of the container itself, whatever a subclass of the user's says."""
    base = next(one for one in _CONTAINERS if issubclass(kind, one))
    return int(base.__len__(value))
