"""One Python object, kept as it is now: what it leads to, and how it is made so again."""

from __future__ import annotations

import functools
import io
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from queue import Queue
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from torchdebug_magics.probing.attributes import Kept, keep_cell, keep_class, keep_function, keep_instance, keep_module

__all__ = ["cost_bytes", "keep"]


def keep(value: Any) -> Kept:
    """By what it is: a value of no known kind is an instance with attributes, or leads nowhere."""
    for kind in type(value).__mro__:
        keeper = _KEEPERS.get(kind)
        if keeper is not None:
            # A subclass of a container may have attributes besides its items.
            kept = keeper(value)
            return kept if type(value) is kind else _together(kept, keep_instance(value))
    return _from_numpy(value) or keep_instance(value)


def cost_bytes(value: Any) -> int:
    """About how much memory `keep` takes."""
    kind = type(value)
    if kind in _KEEPERS and hasattr(kind, "__len__") and not issubclass(kind, torch.Tensor):
        return 16 * len(value)
    size = getattr(value, "nbytes", 0) if kind.__module__ == "numpy" else 0
    return size if isinstance(size, int) else 0


def _together(one: Kept, other: Kept) -> Kept:
    actions = [action for _, action in (one, other) if action is not None]
    return [*one[0], *other[0]], lambda: [action() for action in actions]


def _mapping(held: dict[Any, Any]) -> Kept:
    # The methods of the type itself: a subclass may count, log or refuse in its own.
    kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
    before = list(kind.items(held))

    def put_back() -> None:
        now = list(kind.items(held))
        if not _same([part for pair in now for part in pair], [part for pair in before for part in pair]):
            kind.clear(held)
            for key, item in before:
                kind.__setitem__(held, key, item)

    return [item for _, item in before], put_back


def _sequence(kind: Any) -> Callable[[Any], Kept]:
    def keep_items(held: Any) -> Kept:
        before = list(kind.__iter__(held))

        def put_back() -> None:
            if not _same(list(kind.__iter__(held)), before):
                kind.clear(held)
                (kind.update if kind is set else kind.extend)(held, before)

        return before, put_back

    return keep_items


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(left is right for left, right in zip(one, other, strict=True))


def _queue(held: Queue[Any]) -> Kept:
    """Other threads may put into it meanwhile: only what was taken comes back, to the front."""
    if type(held.queue) is not deque:
        return (), None
    before = list(held.queue)

    def put_back() -> None:
        with held.mutex:
            left = {id(item) for item in held.queue}
            held.queue.extendleft(item for item in reversed(before) if id(item) not in left)

    return (), put_back


def _leading_to(*attributes: str) -> Callable[[Any], Kept]:
    return lambda value: ([getattr(value, name) for name in attributes], None)


def _tensor(tensor: torch.Tensor) -> Kept:
    """Its hooks, and which memory a parameter stands for. Its numbers are kept where they are written."""
    hooks = _tensor_hooks(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        memory = tensor.data if type(tensor) is torch.nn.Parameter and not tensor.is_meta else None

    def put_back() -> None:
        for before, now in zip(hooks, _tensor_hooks(tensor), strict=True):
            if before is None and now is not None:
                now.clear()
        if memory is not None and tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory

    return hooks, put_back


def _tensor_hooks(tensor: torch.Tensor) -> list[dict[int, Any] | None]:
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]


def _state(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> Callable[[Any], Kept]:
    def keep_state(value: Any) -> Kept:
        before = read(value)
        return (), lambda: write(value, before)

    return keep_state


def _file(stream: Any) -> Kept:
    """How far it was read. What is written to a file stays written."""
    try:
        if stream.closed or not stream.seekable() or not stream.readable():
            return (), None
        before = stream.tell()
    except (OSError, ValueError):
        return (), None
    return (), lambda: stream.seek(before) if stream.tell() != before else None


def _in_memory(stream: Any) -> Kept:
    if stream.closed:
        return (), None
    before, place = stream.getvalue(), stream.tell()

    def put_back() -> None:
        if stream.getvalue() != before:
            stream.seek(0)
            stream.truncate()
            stream.write(before)
        stream.seek(place)

    return (), put_back


def _from_numpy(value: Any) -> Kept | None:
    """NumPy is asked for nothing where nobody imported it."""
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject and value.flags.writeable:
        copy = value.copy()
        return (), lambda: value.__setitem__(..., copy) if value.tobytes() != copy.tobytes() else None
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "Generator":
        before = value.bit_generator.state
        return (), lambda: setattr(value.bit_generator, "state", before)
    if kind.__module__.startswith("numpy.random") and kind.__name__ == "RandomState":
        before = value.get_state()
        return (), lambda: value.set_state(before)
    return None


def _items(value: Iterable[Any]) -> Kept:
    return list(value), None


_KEEPERS: dict[type, Callable[[Any], Kept]] = {
    dict: _mapping,
    OrderedDict: _mapping,
    list: _sequence(list),
    set: _sequence(set),
    deque: _sequence(deque),
    tuple: _items,
    frozenset: _items,
    Queue: _queue,
    type: keep_class,
    ModuleType: keep_module,
    CellType: keep_cell,
    FunctionType: keep_function,
    MethodType: _leading_to("__self__", "__func__"),
    BuiltinMethodType: _leading_to("__self__"),
    functools.partial: _leading_to("func", "args", "keywords"),
    staticmethod: _leading_to("__func__"),
    classmethod: _leading_to("__func__"),
    property: _leading_to("fget", "fset"),
    torch.Tensor: _tensor,
    torch.Generator: _state(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _state(random.Random.getstate, random.Random.setstate),
    io.StringIO: _in_memory,
    io.BytesIO: _in_memory,
    **dict.fromkeys((io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO), _file),
}
