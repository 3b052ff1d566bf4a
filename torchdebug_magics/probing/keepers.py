"""One Python object, kept as it is now: what it leads to, and how it is made so again.

No code of the object's own runs for that: attributes are read from its `__dict__`, never asked for.
"""

from __future__ import annotations

import functools
import io
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from queue import Queue
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from torchdebug_magics.probing.where import is_user_code, owner

__all__ = ["Kept", "cost_bytes", "keep"]

PutBack: TypeAlias = Callable[[], object]
Kept: TypeAlias = tuple[Iterable[object], PutBack | None]
"""What an object leads to, and what puts it back; None where nothing of it can change."""

_ABSENT = object()
_HEAP_TYPE = 1 << 9
"""The flag of a class that was made by a `class` statement."""
_SHARED = ("_thread", "threading", "multiprocessing", "concurrent", "asyncio", "_socket", "socket", "selectors")
"""Where the types of locks, threads and connections are from."""


def keep(value: Any) -> Kept:
    """By what it is: a value of no known kind is an instance with attributes, or leads nowhere."""
    for kind in type(value).__mro__:
        keeper = _KEEPERS.get(kind)
        if keeper is not None:
            # A subclass of a container may have attributes besides its items.
            kept = keeper(value)
            return kept if type(value) is kind else _together(kept, _instance(value))
    return _from_numpy(value) or _instance(value)


def cost_bytes(value: Any) -> int:
    """About how much memory `keep` takes."""
    if isinstance(value, (dict, list, set, deque, tuple, frozenset)):
        return 16 * len(value)
    size = getattr(value, "nbytes", 0) if type(value).__module__ == "numpy" else 0
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


def _instance(value: Any) -> Kept:
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


@functools.lru_cache(maxsize=2048)
def _members(kind: Hashable) -> tuple[MemberDescriptorType, ...]:
    """The `__slots__` of a class that was made in Python."""
    return tuple(
        member
        for one in (kind.__mro__ if isinstance(kind, type) else ())
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


def _class(kind: type) -> Kept:
    module = sys.modules.get(kind.__module__)
    if not kind.__flags__ & _HEAP_TYPE or owner(getattr(module, "__file__", None) or "") != "user":
        return (), None
    before = {name: value for name, value in vars(kind).items() if not name.startswith("__")}

    def put_back() -> None:
        for name, value in before.items():
            if vars(kind).get(name, _ABSENT) is not value:
                type.__setattr__(kind, name, value)

    return [*vars(kind).values(), *kind.__mro__[1:]], put_back


def _module(module: ModuleType) -> Kept:
    """A module of the user's; what is installed is nobody's state."""
    file = vars(module).get("__file__")
    is_users = isinstance(file, str) and owner(file) == "user"
    return (list(vars(module).values()), _namespace(vars(module))) if is_users else ((), None)


def _cell(cell: CellType) -> Kept:
    try:
        content = cell.cell_contents
    except ValueError:
        return (), None
    return [content], lambda: setattr(cell, "cell_contents", content)


def _function(function: FunctionType) -> Kept:
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


def _leading_to(*attributes: str) -> Callable[[Any], Kept]:
    return lambda value: ([getattr(value, name) for name in attributes], None)


def _tensor(tensor: torch.Tensor) -> Kept:
    """Its hooks, and which memory it stands for. Its numbers are kept where they are written, see `Writes`."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks = [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
        if type(tensor) is not torch.nn.Parameter or tensor.is_meta:
            return hooks, None
        memory = tensor.data

    def put_back() -> None:
        if tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory

    return hooks, put_back


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
    type: _class,
    ModuleType: _module,
    CellType: _cell,
    FunctionType: _function,
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
