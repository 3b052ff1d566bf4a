"""Objects that have a state inside, or are shared with others: generators of random numbers, files, arrays, tensors, queues."""

from __future__ import annotations

import functools
import gc
import heapq
import io
import itertools
import random
import sys
from array import array as flat_array
from collections.abc import Callable
from queue import LifoQueue, PriorityQueue, Queue
from types import BuiltinFunctionType, BuiltinMethodType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch

from torchdebug_magics.probing.state.attributes import CELL, CLASS, FUNCTION, INSTANCE, MODULE, NAMES, Names, attributes_of
from torchdebug_magics.probing.state.kinds import CONTAINERS, GONE, LEAVES, Kind, State
from torchdebug_magics.probing.tensors import is_traced

_NOT_THE_USERS = frozenset({__name__.partition(".")[0], "IPython", "ipykernel", "ipywidgets", "traitlets", "zmq", "tornado", "logging"})
"""Packages whose objects run the notebook, or watch it: what they hold is not the step's, and goes on meanwhile."""
_OPAQUE = LEAVES | {CodeType, FrameType, TracebackType}
_TAKING = Kind(gc.get_referents)
"""Iterators without a place of their own: they stand where those stand that they take from."""
_COMPLETE = frozenset({CLASS, MODULE})
"""They look at all attributes, of a subclass too."""


def _state(take: Callable[[Any], Any], put_back: Callable[[Any, Any], object], cost_bytes: Callable[[Any], int] = lambda _: 0) -> Kind:
    return Kind(lambda value: [State([take(value)])], lambda value, parts: put_back(value, parts[0][0]), cost_bytes=cost_bytes)


# --- streams ---------------------------------------------------------------------------------------------------------------------
def _file(kind: Any) -> Kind:
    """How far it was read. What is written to a file stays written."""

    def read(stream: Any) -> list[Any] | None:
        # Where `tell` raises (an iterator reads from it, it was closed) there is nothing to come back to.
        return [kind.tell(stream)] if kind.seekable(stream) and kind.readable(stream) else None

    def write(stream: Any, parts: list[Any]) -> None:
        if kind.tell(stream) != parts[0]:
            kind.seek(stream, parts[0])

    return Kind(read, write)


def _in_memory(kind: Any) -> Kind:
    def write(stream: Any, parts: list[Any]) -> None:
        text, place = parts
        if kind.getvalue(stream) != text:
            kind.seek(stream, 0)
            kind.truncate(stream)
            kind.write(stream, text)
        kind.seek(stream, place)

    # How long it is cannot be asked without a copy; who writes to it stands at its end.
    return Kind(lambda stream: [kind.getvalue(stream), kind.tell(stream)], write, cost_bytes=kind.tell)


# --- queues: other threads may put into one meanwhile; only what was taken comes back, to the front ------------------------------
def _read_queue(queue: Queue[Any]) -> list[Any]:
    return [queue.unfinished_tasks, *queue.queue]


def _write_queue(queue: Queue[Any], parts: list[Any]) -> None:
    unfinished, *before = parts
    if any(item is GONE for item in before):
        return
    known = {id(item) for item in before}
    with queue.mutex:
        new = [item for item in queue.queue if id(item) not in known]
        queue.unfinished_tasks = unfinished + len(new)
        items: Any = queue.queue
        items.clear()
        items.extend(before)
        for item in new:
            heapq.heappush(items, item) if isinstance(queue, PriorityQueue) else items.append(item)


# --- iterators over what has places: how far they are --------------------------------------------------------------------------
def _read_iterator(iterator: Any) -> list[Any] | None:
    """An iterator that is at its end has forgotten what it went over: there is no way back."""
    reduced = iterator.__reduce__()
    return [State(reduced[2:])] if len(reduced) > 2 else None  # noqa: PLR2004 - function, arguments, place


def _write_iterator(iterator: Any, parts: list[Any]) -> None:
    iterator.__setstate__(parts[0][0])


_ITERATOR = Kind(_read_iterator, _write_iterator)
_ITERATORS = tuple(map(type, (iter([]), iter(()), iter(range(0)), iter("a"), iter("\xe9"), reversed([]))))
# --- tensors: hooks, and which memory a parameter stands for; numbers are kept where they are written ---------------------------
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer})


def _hooks(tensor: torch.Tensor) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]


def _read_tensor(tensor: torch.Tensor) -> list[Any]:
    with torch._C.DisableTorchFunctionSubclass():
        memory = (tensor.data, 0 if tensor.is_inference() else tensor._version) if _has_memory(tensor) else None
    return [*_hooks(tensor), State([memory])]


def _write_tensor(tensor: torch.Tensor, parts: list[Any]) -> None:
    for before, now in zip(parts, _hooks(tensor), strict=False):
        if before is None and now is not None:
            now.clear()
    memory = parts[-1][0]
    with torch._C.DisableTorchFunctionSubclass():
        if memory is None or _shape_of(tensor) == _shape_of(memory[0]):
            return
        tensor.data = memory[0]
        if not tensor.is_inference():  # a graph of the user's that saved it finds it as it was
            torch._C._autograd._unsafe_set_version_counter((tensor,), (memory[1],))


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return not is_traced(tensor.data)


def _shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """In-place views, `resize_` and `set_` change it."""
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype  # `shape` raises in a lazy one


# --- NumPy is asked for nothing where nobody imported it --------------------------------------------------------------------------
def _plain(array: Any) -> Any:
    """Without what a class of arrays does besides, such as to mask some."""
    return _numpy().ndarray.view(array, _numpy().ndarray)


def _write_array(array: Any, copy: Any) -> None:
    if _plain(array).tobytes() != copy.tobytes():
        _plain(array)[...] = copy


_ARRAY = _state(lambda array: _plain(array).copy(), _write_array, lambda array: int(array.nbytes))
_NUMPYS = {
    "Generator": _state(
        lambda generator: generator.bit_generator.state, lambda generator, state: setattr(generator.bit_generator, "state", state)
    ),
    "RandomState": _state(lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state)),
}


def _write_objects(array: Any, parts: list[Any]) -> None:
    for place, part in enumerate(parts):
        index = tuple(int(position) for position in _numpy().unravel_index(place, array.shape)) if array.ndim else ()
        if part is not GONE and array[index] is not part:
            array[index] = part


def _numpy() -> Any:
    return sys.modules["numpy"]


_OBJECTS = Kind(lambda array: array.ravel().tolist(), _write_objects, cost_bytes=lambda array: 2 * int(array.nbytes))


def of_numpy(value: Any) -> Kind | None:
    """For an array that can be written, of a subclass too, and for generators."""
    kind = type(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        if not value.flags.writeable or (value.dtype.hasobject and value.dtype.kind != "O"):
            return None
        return _OBJECTS if value.dtype.hasobject else _ARRAY
    return _NUMPYS.get(kind.__name__) if kind.__module__.startswith("numpy.random") else None


QUEUE = Kind(_read_queue, _write_queue)
TENSOR = Kind(_read_tensor, _write_tensor)
STATES: dict[type, Kind] = {
    random.Random: _state(random.Random.getstate, random.Random.setstate),
    torch.Generator: _state(torch.Generator.get_state, torch.Generator.set_state),
    **{kind: _file(kind) for kind in (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)},
    **{kind: _in_memory(kind) for kind in (io.StringIO, io.BytesIO)},
    flat_array: _state(
        lambda array: array[:], lambda array, before: array.__setitem__(slice(None), before), lambda array: len(array) * array.itemsize
    ),
    **dict.fromkeys((Queue, LifoQueue, PriorityQueue), QUEUE),
    **dict.fromkeys(_ITERATORS, _ITERATOR),
}


def is_generator(value: object) -> bool:
    """Whether random numbers are drawn from it."""
    kind = type(value)
    return kind in {random.Random, torch.Generator} or (kind.__module__.startswith("numpy.random") and kind.__name__ in _NUMPYS)


def ways_of(value: Any) -> list[Kind]:
    """None for what never changes, and for what is none of the user's; a value of no known kind has attributes."""
    kind = type(value)
    if kind is Names:
        return [NAMES]
    if _is_opaque(value):
        return []
    for base in kind.__mro__:
        way = _WAYS.get(base)
        if way is not None:
            return [way] if base is kind or way in _COMPLETE else [way, INSTANCE]
    known = of_numpy(value)
    return [INSTANCE] if known is None else [known] if attributes_of(value) is None else [known, INSTANCE]


def _is_opaque(value: object) -> bool:
    kind = type(value)
    return (
        kind in _OPAQUE or (kind is BuiltinFunctionType and not _bound(value)) or str(kind.__module__).partition(".")[0] in _NOT_THE_USERS
    )


def _bound(function: Any) -> bool:
    """``hook = kept.append`` is a built-in function with the list inside it."""
    owner = function.__self__
    return owner is not None and type(owner).__name__ != "module"


def _leading_to(*attributes: str) -> Kind:
    return Kind(lambda value: [getattr(value, name) for name in attributes])


def _cache(function: Any) -> list[Any]:
    """The results that a function keeps. Where only so many are kept, the dict alone is not the whole of it: then it is left alone."""
    if function.cache_parameters()["maxsize"] is not None:
        return []
    return [referent for referent in gc.get_referents(function) if type(referent) is dict and referent is not vars(function)]


_WAYS: dict[type, Kind] = {
    **CONTAINERS,
    **STATES,
    frozenset: Kind(list),
    type: CLASS,
    ModuleType: MODULE,
    CellType: CELL,
    FunctionType: FUNCTION,
    MethodType: _leading_to("__self__", "__func__"),
    BuiltinMethodType: _leading_to("__self__"),
    functools.partial: _leading_to("func", "args", "keywords"),
    staticmethod: _leading_to("__func__"),
    classmethod: _leading_to("__func__"),
    functools._lru_cache_wrapper: Kind(_cache, also=lambda function: [function.__wrapped__, vars(function)]),
    property: _leading_to("fget", "fset"),
    torch.Tensor: TENSOR,
    **dict.fromkeys((zip, map, filter, enumerate, *(var for var in vars(itertools).values() if isinstance(var, type))), _TAKING),
}
