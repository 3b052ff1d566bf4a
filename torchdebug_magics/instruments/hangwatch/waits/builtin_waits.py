"""What a call that has no frame of its own, as it is written in C, waits for: told by the object that is called."""

from __future__ import annotations

import _thread
import ast
import gc
import io
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from queue import SimpleQueue
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal, TypeAlias
from weakref import ref

from torchdebug_magics.probing.source.call_sites import MISSING, calls_on_line, names_of, node_at, value_of
from torchdebug_magics.probing.source.syntax import last_name
from torchdebug_magics.probing.source.user_code import frames_above, is_module_code, is_user_code, owner, writes_of
from torchdebug_magics.probing.state.attributes import HEAP_TYPE, referents, whose

LOCKS: tuple[type, ...] = (_thread.LockType, type(_thread.RLock()))
_WAITS_FOR_CHILD = frozenset({"waitpid", "waitid", "wait", "wait3", "wait4"})
_SELECTS = frozenset({"select", "poll"})
_SOCKET = frozenset({"recv", "recv_into", "recvfrom", "accept", "connect", "sendall", "send"})
_FILE = frozenset({"read", "readline", "readlines", "readinto", "read1", "write", "flush", "open"})
_MOST_OBJECTS, _MOST_VISITS = 20_000, 100_000
_MOST_DEEP = 3
_MOST_ITEMS = 1_000
"""Of a container; one with more holds data."""
_PLAIN: tuple[type, ...] = (int, float, complex, str, bytes, bytearray, bool, type(None), range, CodeType, FrameType, ModuleType, ref)
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)
_DATA = frozenset({"torch", "torch._C", "torch.nn.parameter", "numpy", "pandas.core.frame", "pandas.core.series", "PIL.Image"})
_SHARED = ("multiprocessing.queues", "multiprocessing.connection", "multiprocessing.synchronize", "multiprocessing.managers")
_KERNELS = ("IPython", "ipykernel", "jupyter", "tornado", "zmq", "traitlets", "debugpy", "pydevd", "_pydev")
"""They hold all of the user's names, which they do not use."""
Kind: TypeAlias = Literal[
    "lock", "queue", "event", "join", "batch", "collective", "input", "sleep", "io", "native", "gil", "python", "dead"
]  # fmt: skip
Target: TypeAlias = tuple[Literal["thread", "process", "task"], int]
"""A thread of the same process by its ident, a process by its number, an asyncio task by its id."""
_RUNNERS = frozenset({"run_code", "run_cell_async", "run_ast_nodes"})
"""IPython's coroutines, inside which the cell runs."""
_STEPS = ("_asyncio", "asyncio.futures", "asyncio.tasks")
"""Callbacks by which a task goes on."""
_AWAITS = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""The attributes of a coroutine or generator for its frame, and for what it awaits."""
_MOST_AWAITED = 100


def builtin_wait(frame: FrameType) -> Waiting | None:
    """Of the innermost frame of a thread; None where it runs, or where what it calls cannot be told."""
    names = names_of(frame)
    node = node_at(frame)
    for candidate in [node] if node is not None else calls_on_line(frame):
        if isinstance(candidate, ast.Call):
            waiting = _of_call(candidate, frame, names)
        else:  # `with lock:`, whose entering has no call in the source
            waiting = lock_wait(value_of(candidate, frame, names), candidate)
        if waiting is not None:
            return waiting
    return None


def called_name(frame: FrameType) -> str:
    """What the frame calls, as it is written: ``"torch.mm"``; empty where that is not known."""
    node = node_at(frame)
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _of_call(node: ast.Call, frame: FrameType, names: dict[str, Any]) -> Waiting | None:  # noqa: PLR0911 - a table by function
    if isinstance(node.func, ast.Attribute):
        held = value_of(node.func.value, frame, names)
        if held is not MISSING and (waiting := _method(held, node.func.attr, node, frame, names)) is not None:
            return waiting
    function = value_of(node.func, frame, names)
    holder = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if function is time.sleep:
        seconds = _argument(node, 0, "secs", frame, names)
        return Waiting("sleep", f"time.sleep({seconds:g})" if isinstance(seconds, (int, float)) else "time.sleep()")
    if function is input:
        return Waiting("input", "your input")
    if holder is os or getattr(function, "__module__", "") == "posix":
        if name in _WAITS_FOR_CHILD:
            pid = _argument(node, 0, "pid", frame, names)
            return Waiting("join", "the end of a process", targets=[("process", pid)] if isinstance(pid, int) and pid > 0 else [])
        return Waiting("io", f"os.{name}()") if name in {"read", "write", "open"} else None
    if function is select.select or (holder is not None and name in _SELECTS and type(holder).__module__ == "select"):
        value = _argument(node, 3 if function is select.select else 0, "timeout", frame, names)
        return Waiting("io", "a file or socket", timeout_s=float(value) if type(value) in {int, float} and value >= 0 else None)
    return _method(holder, name, node, frame, names) if isinstance(holder, LOCKS) else None


def _method(held: Any, name: str, node: ast.Call, frame: FrameType, names: dict[str, Any]) -> Waiting | None:  # noqa: PLR0911 - as above
    kind: Any = type(held)
    if name in {"acquire", "__enter__"} and (isinstance(held, LOCKS) or kind.__module__ in {"threading", "multiprocessing.synchronize"}):
        if _argument(node, 0, "blocking", frame, names) is False or _argument(node, 0, "block", frame, names) is False:
            return None
        return lock_wait(held, node.func, _timeout(node, frame, names))
    if isinstance(held, SimpleQueue) and name == "get":
        return Waiting("queue", "queue.get()", on=held, timeout_s=_timeout(node, frame, names), facts={"get": True})
    if isinstance(held, socket.socket) and name in _SOCKET:
        return Waiting("io", "a socket", timeout_s=held.gettimeout(), facts={"network": held.family != socket.AF_UNIX})
    if isinstance(held, io.IOBase) and name in _FILE:
        path = getattr(held, "name", "")
        return Waiting("io", f"the file {path}" if isinstance(path, str) and path else "a pipe or file", facts=pipe_of(held))
    if kind.__module__ == "torch._C._distributed_c10d":
        return Waiting("collective", "a collective's wait()" if "Work" in kind.__name__ else f"the store's {name}()", facts={"op": name})
    if kind.__module__ in {"select", "selectors"}:
        return Waiting("io", "a file or socket", timeout_s=_timeout(node, frame, names))
    return None


def pipe_of(file: Any, *kinds: str) -> dict[str, str]:
    """The pipe that a file or a connection reads or writes, as the system names it: ``pipe:[123]``; `kinds` are others that count."""
    try:
        target = os.readlink(f"/proc/self/fd/{file.fileno()}")  # noqa: PTH115 - it is no path
    except (OSError, ValueError, AttributeError):
        return {}
    return {"pipe": target} if target.startswith(("pipe:", *kinds)) else {}


def lock_wait(held: Any, node: ast.expr | None = None, timeout_s: float | None = None) -> Waiting | None:
    """For a lock of any kind; None for what is none. `node` is how the user's code calls the lock, or its method."""
    module, kind = type(held).__module__, type(held).__name__
    what, on, facts = "", held, {}
    semaphore = getattr(held, "_semlock", None) if module == "multiprocessing.synchronize" else None
    if isinstance(held, LOCKS):
        what = "lock"
    elif module == "threading" and kind in {"Condition", "Semaphore", "BoundedSemaphore"}:
        what, on = ("lock", getattr(held, "_lock", held)) if kind == "Condition" else ("semaphore", held)
    elif semaphore is not None:
        what, facts = f"multiprocessing {kind}", {"semaphore": getattr(semaphore, "name", "")}
    if node is not None:
        is_method = isinstance(node, ast.Attribute) and node.attr in {"acquire", "__enter__"}
        facts["name"] = last_name(node.value if isinstance(node, ast.Attribute) and is_method else node)
    return Waiting("lock", what, on=on, timeout_s=timeout_s, facts=facts) if what else None


def _timeout(node: ast.Call, frame: FrameType, names: dict[str, Any]) -> float | None:
    value = _argument(node, 1, "timeout", frame, names)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _argument(node: ast.Call, place: int, name: str, frame: FrameType, names: dict[str, Any]) -> Any:
    for keyword in node.keywords:
        if keyword.arg == name:
            return value_of(keyword.value, frame, names)
    return value_of(node.args[place], frame, names) if len(node.args) > place else MISSING


class Reach:
    """All that the frames of one thread lead to: by local names, by global names that the user's functions use, and by what those hold."""

    def __init__(self, frames: Sequence[FrameType], others: Iterable[object] = ()) -> None:
        self._met: set[int] = set()
        self.shares = False
        """Whether a queue, a pipe or a lock between processes is met."""
        self._is_cut = False
        """Whether there was more than we looked at, so that nothing can be said."""
        self._runs_users = any(is_user_code(frame.f_code) for frame in frames)
        self._near: set[int] = set()
        """What the user's own code has a name for, and the attributes of that."""
        waiting: deque[Any] = deque(others)
        # Of a cell, without those that run it; none of a thread of the kernel's own.
        end = next((at for at, frame in enumerate(frames) if is_kernels(str(frame.f_globals.get("__name__")))), len(frames))
        is_kernel = end < len(frames) and not any(is_user_code(frame.f_code) for frame in frames[:end])
        for frame in () if is_kernel else frames[:end]:
            start = len(waiting)
            names = names_of(frame)
            self._is_cut |= not names and bool(frame.f_code.co_nlocals)
            if is_module_code(frame.f_code):
                waiting.extend(names[name] for name in writes_of(frame.f_code).loaded if name in names)
            else:
                waiting.extend(names.values())
                waiting.extend(_globals_of(frame.f_code, frame.f_globals))
            if is_user_code(frame.f_code):
                self._near.update(id(near) for value in (*waiting,)[start:] for near in (value, *_attributes(value)))
        many = 0
        while waiting and not self._is_cut:
            self._go_on(waiting.popleft(), waiting)
            many += 1
            self._is_cut |= many > _MOST_VISITS or len(self._met) > _MOST_OBJECTS

    def can_get(self, wanted: object) -> bool:
        """Whether it could, as far as can be told; of a library's thread that leads to very much, only what was met counts."""
        return id(wanted) in self._met or (self._is_cut and self._runs_users)

    def names(self, wanted: object) -> bool:
        """Whether the user's code has a name for it, or for what it is an attribute of."""
        return id(wanted) in self._near

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
        elif issubclass(kind, type):
            bases = type.__dict__["__mro__"].__get__(value)
            waiting.extend(held for base in bases if whose(base) == "user" for held in tuple(vars(base).values()))
        elif (base := next((base for base in _CONTAINERS if issubclass(kind, base)), None)) and (many := base.__len__(value)) > _MOST_ITEMS:
            # Its own length, whatever a subclass of the user's says.
            first = referents(value)[:1] if many < _MOST_VISITS else []
            self._is_cut |= not all(issubclass(type(one), (*_PLAIN, *_CONTAINERS)) or _is_data(one) for one in first)
        elif not _is_data(value):
            waiting.extend(referents(value))


def _attributes(value: Any) -> list[Any]:
    """What an object holds; nothing of the user's is called, as `getattr` and `isinstance` could."""
    kind: Any = type(value)
    if issubclass(kind, (type, FunctionType, ModuleType)) or not (kind.__flags__ & HEAP_TYPE or kind.__dictoffset__):
        return []
    held = gc.get_referents(value)
    return [*held, *(one for space in held if type(space) is dict for one in tuple(space.values()))]


def is_kernels(module: str) -> bool:
    """Whether it is code by which the kernel runs cells and talks to the front end."""
    return module.startswith(_KERNELS)


def _globals_of(code: CodeType, space: dict[str, Any]) -> Iterator[Any]:
    """What the global names of a function of the user's stand for; a library's own functions are trusted to use what they are given."""
    for name in writes_of(code).loaded if is_user_code(code) else ():
        value = space.get(name)
        yield value
        if type(value) is ModuleType:
            yield from _of_module(value, writes_of(code).loaded_attributes)


def _of_module(module: ModuleType, attributes: frozenset[str], depth: int = 0) -> Iterator[Any]:
    """``module.name``, and ``module.inner.name``."""
    file = vars(module).get("__file__")
    if file and owner(file) == "user":
        for value in (vars(module).get(attribute) for attribute in attributes):
            yield value
            if type(value) is ModuleType and depth < _MOST_DEEP:
                yield from _of_module(value, attributes, depth + 1)


def _is_data(value: Any) -> bool:
    """Whether a value leads to no lock or queue: data, or the names of a whole module."""
    kind: Any = type(value)
    if kind is dict and "__builtins__" in value and "__name__" in value:
        return True
    return str(kind.__module__) in _DATA


@dataclass
class Waiting:
    """One wait."""

    kind: Kind
    what: str
    """A phrase: ``"batch 2"``, ``"lock"``."""
    on: Any = None
    """The object, such as a lock: compared by identity in its own process."""
    targets: list[Target] = field(default_factory=list)
    """Who would end the wait, where that is known."""
    able: list[Target] = field(default_factory=list)
    """Who else could end it: code that can get at what is waited for."""
    timeout_s: float | None = None
    """After which the wait gives up, counted from its beginning; None for one without a timeout."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a cause is told by: ``debugger``, ``network``, ``idle``, ``acquired`` (file, line, function), ``semaphore`` (a name), ..."""


def loop_tasks(frames: Sequence[FrameType]) -> tuple[list[Any], Any | None]:
    """The tasks of the event loop that a thread runs, none where it runs no loop, or a task; and the one for which its own code waits.

    That is the task of ``asyncio.run``, or the one that runs the cell.
    """
    inner = takewhile(lambda frame: owner(frame.f_code.co_filename) != "user", frames)
    running = next(filter(runs_loop, inner), None)
    if running is None:
        return [], None
    asyncio: Any = sys.modules["asyncio"]
    try:
        tasks = [task for task in asyncio.all_tasks(names_of(running).get("self")) if not task.done()]
    except RuntimeError:  # the set has changed meanwhile
        return [], None
    for frame in frames:
        if frame.f_code.co_name == "run_until_complete":
            future = names_of(frame).get("future")
            return tasks, next((task for task in tasks if task is future), None)
    return tasks, next((task for task in tasks if _runs_cell(task_frames(task))), None)


def _runs_cell(frames: Sequence[FrameType]) -> bool:
    return any(frame.f_code.co_name in _RUNNERS for frame in frames) and any(owner(frame.f_code.co_filename) == "user" for frame in frames)


def scheduled_callbacks(frames: Sequence[FrameType]) -> list[Any]:
    """What the event loop that a thread runs will call, with its arguments: what the user's code has asked it for."""
    loops = [names_of(frame).get("self") for frame in frames if runs_loop(frame)]
    handles = [handle for loop in loops for name in ("_ready", "_scheduled") for handle in tuple(getattr(loop, name, ()))]
    keys = [key for loop in loops for key in tuple(getattr(getattr(loop, "_selector", None), "_fd_to_key", {}).values())]
    ready = [handle for key in keys if isinstance(key.data, tuple) for handle in key.data if handle is not None]
    handles += [handle for handle in ready if not any(getattr(handle._callback, "__self__", None) is loop for loop in loops)]
    modules = [str(getattr(handle._callback, "__module__", "_asyncio")) for handle in handles]
    wanted = [one for one, module in zip(handles, modules, strict=True) if not is_kernels(module) and not module.startswith(_STEPS)]
    return [part for one in wanted for part in (one._callback, *(one._args or ()))]


def cell_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the cell that awaits, innermost first, where a thread is in the event loop; else none."""
    _, task = loop_tasks(list(frames_above(frame)))
    return task_frames(task) if task is not None else []


def task_frames(task: Any) -> list[FrameType]:
    """The frames of a task, innermost first."""
    frames: list[FrameType] = []
    awaited: Any = task.get_coro()
    while len(frames) < _MOST_AWAITED:
        names = next((names for names in _AWAITS if hasattr(awaited, names[0])), None)
        if names is None or (frame := getattr(awaited, names[0])) is None:
            break
        frames.append(frame)
        awaited = getattr(awaited, names[1], None)
    return frames[::-1]


def awaited(task: Any) -> list[Any]:
    """The future that a task awaits, and those that it gathers."""
    waited = getattr(task, "_fut_waiter", None)
    return [waited, *(getattr(waited, "_children", None) or ())]


def runs_loop(frame: FrameType) -> bool:
    """Whether it is the frame of asyncio's in which an event loop waits and calls what is ready."""
    return frame.f_code.co_name == "_run_once" and frame.f_globals.get("__name__") == "asyncio.base_events"
