"""What a walk over holders passes by, and what containers hold, with the names of the places in them: no method of a subclass runs."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, TypeAlias, TypeVar

import torch

from torchdebug_magics.probing.source.user_code import frames_above, local_values, owner
from torchdebug_magics.probing.state.attributes import HEAP_TYPE, attributes_of
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
_LONGEST = 40
_MOST_FRAMES = 500


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


Named: TypeAlias = Iterator[tuple[str, object]]
"""(how it is written behind the holder's name, what is held)."""
_WORDS = (str, int, float, bool, bytes, type(None))


def place(key: object) -> str:
    """``['loss']``, ``[3]``; ``[...]`` where to show the key would run code of the user's, or would be long."""
    plain = type(key) in _WORDS or (type(key) is tuple and all(type(item) in _WORDS for item in key))
    text = repr(key) if plain else "..."
    return f"[{text}]" if len(text) <= _LONGEST else "[...]"


def _in_dict(value: dict[Any, Any]) -> Iterable[object]:
    for key, item in dict.items(value):
        yield item
        yield key


def _names_in_dict(value: dict[Any, Any]) -> Named:
    for key, item in dict.items(value):
        yield place(key), item
        yield ".<key>", key


def _by_position(base: Any) -> Callable[[Any], Named]:
    return lambda value: ((f"[{position}]", item) for position, item in enumerate(base.__iter__(value)))


def _unordered(base: Any) -> Callable[[Any], Named]:
    return lambda value: (("{...}", item) for item in base.__iter__(value))


CONTAINERS: Mapping[type, Callable[[Any], Iterable[object]]] = {
    dict: _in_dict,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    deque: deque.__iter__,
}
"""By the very type: what is held in it."""
PLACES: Mapping[type, Callable[[Any], Named]] = {
    dict: _names_in_dict,
    **{base: _by_position(base) for base in (list, tuple, deque)},
    **{base: _unordered(base) for base in (set, frozenset)},
}
"""By the type or one of its bases: the names of the places."""


def running_frames() -> Iterator[tuple[str, FrameType]]:
    """(thread, empty for this one; frame) of each call of the user's, and of those that these make.

    The outermost come first, as whoever made a value keeps it longer.
    """
    here = threading.get_ident()
    names = dict(thread_names())
    # Our own frames, this one too, are met only inside a call that ends at once: held by one of them, they would hold all for good.
    calls = {
        identity: _calls_up_to(innermost, frozenset({"user"} if identity == here else {"user", "torch"}))
        for identity, innermost in sys._current_frames().items()
    }
    for identity, frames in calls.items():
        thread = "" if identity == here else names.get(identity, str(identity))
        yield from ((thread, frame) for frame in frames)


def _calls_up_to(innermost: FrameType, starts: frozenset[str]) -> list[FrameType]:
    """From the outermost call to the last one of these owners, without those that are ours.

    What torch's own calls hold, where these are not the last, the calls around them hold under the user's names.
    """
    frames = [frame for frame, _ in zip(frames_above(innermost), range(_MOST_FRAMES), strict=False)]
    whose = [owner(frame.f_code.co_filename) for frame in frames]
    last = max((at for at, one in enumerate(whose) if one in starts), default=-1)
    calls = list(zip(frames, whose, strict=True))[: last + 1]
    passed = {"own", "torch"} - starts
    return [frame for frame, whose_call in reversed(calls) if whose_call not in passed and not _is_cut(frame)]


def thread_names() -> Iterator[tuple[int | None, str]]:
    """(identity, name) of each thread; a subclass of the user's may have properties of these names."""
    for held in map(attributes_of, threading.enumerate()):
        yield (held or {}).get("_ident"), str((held or {}).get("_name"))


def _is_cut(frame: FrameType) -> bool:
    name = dict.get(frame.f_globals, "__name__")
    return isinstance(name, str) and is_machinery(name)


def in_frame(frame: FrameType) -> list[object]:
    """The locals of a call that has ended, and its callers: a frame that is held holds them."""
    if _is_cut(frame):
        return []
    spaces = (frame.f_globals, frame.f_builtins)
    return [referent for referent in gc.get_referents(frame) if not any(referent is space for space in spaces)]


def names_in_frame(frame: FrameType) -> Named:
    """Each local, and the caller."""
    yield from ((f" {name!r}", value) for name, value in local_values(frame).items())
    yield f" called by {frame.f_back.f_code.co_name}" if frame.f_back else "", frame.f_back


def names_in_traceback(trace: TracebackType | None) -> Named:
    """Function and line, as they are read in a traceback; all frames of the chain at once, as there may be a thousand."""
    while trace is not None:
        yield f" -> {trace.tb_frame.f_code.co_name}:{trace.tb_lineno}", trace.tb_frame
        trace = trace.tb_next
