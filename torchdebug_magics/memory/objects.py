"""What any object holds, asked of the collector, or read where torch keeps it: no code of the object's runs, nor an unpack hook."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import torch

from torchdebug_magics.memory import containers
from torchdebug_magics.memory.containers import Named, bases, is_a, module_of, names_of_type, of_type, place, whose_module
from torchdebug_magics.probing.source.user_code import local_values
from torchdebug_magics.probing.state.attributes import attributes_of, members_of, referents
from torchdebug_magics.probing.storages import held_of

_BASE: Any = torch._C.TensorBase
_FUNCTION: Any = torch._C._FunctionBase
_ADDRESS: Any = torch._C._storage_address  # type: ignore[attr-defined]  # its stub is missing
T = TypeVar("T")
_RAW = "_raw_saved_"
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def addresses_of(value: Any) -> tuple[int, ...]:
    """The `_cdata` of each storage that a tensor or a storage stands for; none for any other object."""
    if is_a(type(value), torch.UntypedStorage):
        return (torch.UntypedStorage._cdata.__get__(value),)
    return _of_each_part(value, _ADDRESS) if is_a(type(value), _BASE) else ()


def storages_of(value: Any) -> tuple[torch.UntypedStorage, ...]:
    """The storages themselves."""
    if is_a(type(value), torch.UntypedStorage):
        return (value,)
    return _of_each_part(value, _BASE.untyped_storage) if is_a(type(value), _BASE) else ()


def _of_each_part(tensor: Any, ask: Callable[[Any], T]) -> tuple[T, ...]:
    """A sparse tensor consists of several; of a DTensor, the part in this process: it has no memory itself."""
    tensor = held_of(tensor)
    parts = _PARTS.get(_BASE.layout.__get__(tensor), ())
    try:
        if not parts:
            return (ask(tensor),)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return tuple(ask(getattr(_BASE, part)(tensor)) for part in parts)
    except (RuntimeError, NotImplementedError):  # it has no storage: of a function transform, or opaque
        return ()


def shown_bytes(tensor: Any) -> int | None:
    """Of the memory that it stands for: less than all of it for a part; None for one that is no strided tensor."""
    if not is_a(type(tensor), _BASE) or _BASE.layout.__get__(tensor) is not torch.strided:
        return None
    tensor = held_of(tensor)
    return int(_BASE.numel(tensor) * _BASE.element_size(tensor))


def history_of(tensor: torch.Tensor) -> Any | None:
    """The node that made it; None for one without a history."""
    return _BASE.grad_fn.__get__(tensor)


# --- tensors ---------------------------------------------------------------------------------------------------------------------


def names_in_tensor(tensor: torch.Tensor) -> Named:
    """Its gradient, its history, what it is a view of, and hooks; attributes are those of any object."""
    # That of others torch warns about.
    if _BASE.is_leaf.__get__(tensor) or _BASE.retains_grad.__get__(tensor):
        yield ".grad", _BASE.grad.__get__(tensor)
    yield ".grad_fn", _BASE.grad_fn.__get__(tensor)
    yield "._base", _BASE._base.__get__(tensor)
    yield "._backward_hooks", _BASE._backward_hooks.__get__(tensor)
    yield "._post_accumulate_grad_hooks", _BASE._post_accumulate_grad_hooks.__get__(tensor)


# --- nodes -----------------------------------------------------------------------------------------------------------------------


def is_node(kind: type) -> bool:
    """Whether it is a type of torch's for nodes of the graph, or of a `torch.autograd.Function`."""
    return is_a(kind, _FUNCTION) or ("next_functions" in names_of_type(kind) and "_register_hook_dict" in names_of_type(kind))


def saved_in(node: Any) -> Named:
    """What it has saved for backward, with names."""
    kind: Any = type(node)
    if is_a(kind, _FUNCTION):
        yield from ((f".saved_tensors{place(at)}", held) for at, held in enumerate(_raw(_FUNCTION._raw_saved_tensors, node)))
    for name in () if is_a(kind, _FUNCTION) else _saved_names(kind):
        held, saved = list(_raw(names_of_type(kind)[name], node)), name.removeprefix("_raw_")
        yield from ((f".{saved}{place(at) if len(held) > 1 else ''}", one) for at, one in enumerate(held))


def names_in_node(node: Any) -> Named:
    """What it holds, with names; the attributes of a ``ctx`` are those of any object."""
    kind: Any = type(node)
    yield from saved_in(node)
    if "variable" in names_of_type(kind):
        yield ".variable", names_of_type(kind)["variable"].__get__(node)
    yield from ((f" -> {_name(node)}", node) for node in next_nodes(node))


def all_in(names: Callable[[Any], Named]) -> Callable[[Any], Iterator[object]]:
    """What an object holds: what has one of those names, and all of which the collector knows."""

    def held_by(value: Any) -> Iterator[object]:
        yield from (held for _, held in names(value))
        yield from gc.get_referents(value)

    return held_by


in_tensor, in_node = all_in(names_in_tensor), all_in(names_in_node)


def next_nodes(node: Any) -> list[Any]:
    """The nodes before it, as far as they are."""
    reader = _FUNCTION.next_functions if is_a(type(node), _FUNCTION) else names_of_type(type(node))["next_functions"]
    return [one for one, _ in reader.__get__(node) if one is not None]


def is_used_up(node: Any) -> bool:
    """Whether a backward pass has let go what it had saved, so that none can run through it again."""
    kind: Any = type(node)
    try:
        if is_a(kind, _FUNCTION):
            _FUNCTION._raw_saved_tensors.__get__(node)
            return False
        for name in _saved_names(kind):
            saved = names_of_type(kind)[name].__get__(node)
            # What was packed by a hook has data: so none of the user's is run.
            if not isinstance(saved, (tuple, list)) and saved is not None and saved.data is None:
                names_of_type(kind)[name.replace("_raw", "", 1)].__get__(node)
    except RuntimeError:
        return True
    except AttributeError:
        return False
    return False


def _name(node: Any) -> str:
    return type(node).__name__ if is_a(type(node), _FUNCTION) else str(node.name())


@lru_cache(maxsize=512)
def _saved_names(kind: Any) -> tuple[str, ...]:
    """Of a type of torch's own, which is there as long as the process is."""
    return tuple(name for name in names_of_type(kind) if name.startswith(_RAW))


def _raw(reader: Any, node: Any) -> Iterator[object]:
    """What was packed, as it lies there: `_saved_self` would call the user's unpack hook."""
    try:
        saved = reader.__get__(node)
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            yield one.data
    except (RuntimeError, AttributeError):  # given back after the backward pass, or None
        return


_TABLES = ("_parameters", "_buffers", "_modules")


def held_by(kind: type) -> Callable[[Any], Iterable[object]]:
    """How to ask an object of that very type for what it holds."""
    other = in_node if is_node(kind) else _array if is_array(kind) else referents
    return of_type(containers.CONTAINERS, kind) or next((held for base, held in _HELD.items() if is_a(kind, base)), other)


def names_in(value: object) -> Named:
    """(how it is written behind the name of the object, what is held) for all that has a name."""
    kind = type(value)
    for base in bases(kind):
        for names in (of_type(containers.PLACES, base), of_type(_NAMES, base)):
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


def _in_function(function: types.FunctionType) -> Iterator[object]:
    """All but the globals: the namespace of a module is a root of its own."""
    yield from (held for _, held in _names_in_function(function))
    yield function.__dict__


def _names_in_function(function: types.FunctionType) -> Named:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield from ((f".<closure {name}>", held) for held in _in_cell(cell))
    defaults, code = function.__defaults__ or (), function.__code__
    positional = code.co_varnames[: code.co_argcount]
    yield from ((f".<default {name}>", held) for name, held in zip(positional[len(positional) - len(defaults) :], defaults, strict=False))
    yield from ((f".<default {name}>", held) for name, held in (function.__kwdefaults__ or {}).items())


def _in_cell(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was bound to it so far
        return []


def _members(kind: type, *names: str) -> Callable[[Any], Named]:
    """Of a built-in type, by what itself has under these names: a subclass may have properties of the same names."""
    return lambda value: ((f".{name}", names_of_type(kind)[name].__get__(value)) for name in names)


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
    yield from containers.names_in_traceback(names_of_type(BaseException)["__traceback__"].__get__(error))
    yield from _members(BaseException, "__cause__", "__context__", "args")(error)


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


def _all_named(names: Callable[[Any], Named]) -> Callable[[Any], Iterator[object]]:
    """What an object holds under one of those names, and nothing else."""
    return lambda value: (held for _, held in names(value))


_HELD: Mapping[type, Callable[[Any], Iterable[object]]] = {
    types.FunctionType: _in_function,
    types.FrameType: containers.in_frame,
    types.TracebackType: _all_named(containers.names_in_traceback),
    types.CellType: _in_cell,
    torch.Tensor: in_tensor,
    torch.nn.Module: all_in(_names_in_module),
    torch.optim.Optimizer: _in_optimizer,
    BaseException: all_in(_names_in_exception),  # what is in its traceback is no farther away than what is in another's
    # The attributes of a class of the user's.
    type: lambda kind: [*names_of_type(kind).values(), *bases(kind)[1:]] if whose_module(module_of(kind)) == "user" else [],
    threading.local: _all_named(_names_in_local),
}
_NAMES: Mapping[type, Callable[[Any], Named]] = {
    types.FunctionType: _names_in_function,
    types.MethodType: _members(types.MethodType, "__self__", "__func__"),
    functools.partial: _members(functools.partial, "func", "args", "keywords"),
    type(functools.lru_cache(len)): lambda value: ((".<cache>", held) for held in gc.get_referents(value)),
    threading.local: _names_in_local,
    types.FrameType: containers.names_in_frame,
    types.TracebackType: containers.names_in_traceback,
    BaseException: _names_in_exception,
    types.BuiltinMethodType: _members(types.BuiltinMethodType, "__self__"),
    types.CellType: lambda cell: (("", held) for held in _in_cell(cell)),
    types.GeneratorType: _suspended("gi_frame"),
    types.CoroutineType: _suspended("cr_frame"),
    types.AsyncGeneratorType: _suspended("ag_frame"),
    torch.Tensor: names_in_tensor,
    torch.nn.Module: _names_in_module,
    torch.optim.Optimizer: _names_in_state,
}
