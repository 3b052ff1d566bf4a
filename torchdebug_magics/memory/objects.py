"""What any Python object holds: asked of the collector, which runs no code of the object's. Names are looked for where one is needed."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import (
    AsyncGeneratorType,
    BuiltinMethodType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    TracebackType,
)
from typing import Any

import torch

from torchdebug_magics.memory.containers import (
    CONTAINERS,
    PLACES,
    Named,
    in_frame,
    in_traceback,
    names_in_frame,
    names_in_traceback,
    place,
)
from torchdebug_magics.memory.outside import bases, is_a, module_of, names_of_type, of_type, whose_module
from torchdebug_magics.memory.tensor_holders import all_in, in_node, in_tensor, is_node, names_in_node, names_in_tensor
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.attributes import attributes_of, members_of, referents

_TABLES = ("_parameters", "_buffers", "_modules")


def held_by(kind: type) -> Callable[[Any], Iterable[object]]:
    """How to ask an object of that very type for what it holds."""
    by_type = of_type(_HELD, kind)
    if by_type is not None:
        return by_type
    by_base = next((held for base, held in _HELD_BY_BASE.items() if is_a(kind, base)), None)
    if by_base is not None:
        return by_base
    return in_node if is_node(kind) else _array if is_array(kind) else referents


def names_in(value: object) -> Named:
    """(how it is written behind the name of the object, what is held) for all that has a name."""
    kind = type(value)
    for base in bases(kind):
        for names in (of_type(PLACES, base), of_type(_NAMES, base)):
            yield from names(value) if names is not None else ()
    if is_node(kind):
        yield from names_in_node(value)
    if is_a(kind, type):
        yield from ((f".{name}", held) for name, held in names_of_type(value).items())
        return
    yield from _attributes(value)
    yield ".__class__", kind


def _attributes(value: object) -> Named:
    yield from ((f".{name}", held) for name, held in (attributes_of(value) or {}).items() if type(name) is str)
    for member in members_of(type(value)):
        with suppress(AttributeError):  # nothing is in the slot
            yield f".{member.__name__}", member.__get__(value)
    if is_array(type(value)):
        yield ".base", next(iter(_array(value)), None)


# --- functions -------------------------------------------------------------------------------------------------------------------


def _in_function(function: FunctionType) -> Iterator[object]:
    """All but the globals: the namespace of a module is a root of its own."""
    yield from (held for _, held in _names_in_function(function))
    yield function.__dict__


def _names_in_function(function: FunctionType) -> Named:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield from ((f".<closure {name}>", held) for held in _in_cell(cell))
    defaults, code = function.__defaults__ or (), function.__code__
    positional = code.co_varnames[: code.co_argcount]
    yield from ((f".<default {name}>", held) for name, held in zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    yield from ((f".<default {name}>", held) for name, held in (function.__kwdefaults__ or {}).items())


def _in_cell(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was bound to it so far
        return []


def _names_in_partial(value: Any) -> Named:
    kind: Any = functools.partial
    yield ".func", kind.func.__get__(value)
    yield ".args", kind.args.__get__(value)
    yield ".keywords", kind.keywords.__get__(value)


def _names_in_local(value: Any) -> Named:
    """What `threading.local` has for each thread: a dict of dicts, of which the collector knows."""
    for threads in (referent for referent in gc.get_referents(value) if type(referent) is dict):
        for space in (thread for thread in threads.values() if type(thread) is dict):
            yield from ((f".{name}", held) for name, held in space.items())


# --- calls that stand still --------------------------------------------------------------------------------------------------------


def _suspended(frame: str) -> Callable[[Any], Named]:
    def names(value: Any) -> Named:
        held = getattr(value, frame)  # of a built-in type, which cannot be subclassed
        return ((f" local {name!r}", one) for name, one in local_values(held).items()) if held is not None else iter(())

    return names


def _names_in_exception(error: BaseException) -> Named:
    kind: Any = BaseException
    trace = kind.__traceback__.__get__(error)
    yield from names_in_traceback(trace) if trace is not None else ()
    yield from ((f".{name}", kind.__dict__[name].__get__(error)) for name in ("__cause__", "__context__", "args"))


# --- modules, classes, arrays ------------------------------------------------------------------------------------------------------


def _names_in_module(module: torch.nn.Module) -> Named:
    """Parameters, buffers and modules by their dotted paths."""
    held = attributes_of(module) or {}
    for table in map(held.get, _TABLES):
        if table is not None and is_a(type(table), dict):
            yield from ((f".{name}", one) for name, one in dict.items(table))


def _in_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """Its state without the keys: they are the parameters, which its groups hold."""
    yield from (held for _, held in _names_in_state(optimizer))
    yield from (held for name, held in (attributes_of(optimizer) or {}).items() if name != "state")


def _names_in_state(optimizer: torch.optim.Optimizer) -> Named:
    state = (attributes_of(optimizer) or {}).get("state")
    if state is not None and is_a(type(state), dict):
        yield from ((f".state{place(key)}", held) for key, held in dict.items(state))


def is_array(kind: type) -> bool:
    """Whether it is a type of numpy's arrays."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_a(kind, numpy.ndarray)


def _array(array: Any) -> Iterator[object]:
    """An array does not tell the collector what it stands on: ``tensor.numpy()`` holds the tensor."""
    kind: Any = sys.modules["numpy"].ndarray
    yield kind.base.__get__(array)
    if kind.dtype.__get__(array).hasobject:
        yield from kind.flat.__get__(array)


_HELD: Mapping[type, Callable[[Any], Iterable[object]]] = {
    **CONTAINERS,
    FunctionType: _in_function,
    FrameType: in_frame,
    TracebackType: in_traceback,
    CellType: _in_cell,
}
_HELD_BY_BASE: Mapping[type, Callable[[Any], Iterable[object]]] = {
    torch.Tensor: in_tensor,
    torch.nn.Module: all_in(_names_in_module),
    torch.optim.Optimizer: _in_optimizer,
    BaseException: all_in(_names_in_exception),  # what is in its traceback is no farther away than what is in another's
    # The attributes of a class of the user's.
    type: lambda kind: [*names_of_type(kind).values(), *bases(kind)[1:]] if whose_module(module_of(kind)) == "user" else [],
    threading.local: lambda value: (held for _, held in _names_in_local(value)),
}
_NAMES: Mapping[type, Callable[[Any], Named]] = {
    FunctionType: _names_in_function,
    MethodType: lambda method: iter(((".__self__", method.__self__), (".__func__", method.__func__))),
    functools.partial: _names_in_partial,
    type(functools.lru_cache(len)): lambda value: ((".<cache>", held) for held in gc.get_referents(value)),
    threading.local: _names_in_local,
    FrameType: names_in_frame,
    TracebackType: names_in_traceback,
    BaseException: _names_in_exception,
    BuiltinMethodType: lambda method: iter(((".__self__", method.__self__),)),
    CellType: lambda cell: (("", held) for held in _in_cell(cell)),
    GeneratorType: _suspended("gi_frame"),
    CoroutineType: _suspended("cr_frame"),
    AsyncGeneratorType: _suspended("ag_frame"),
    torch.Tensor: names_in_tensor,
    torch.nn.Module: _names_in_module,
    torch.optim.Optimizer: _names_in_state,
}
