"""What a call that has no frame of its own, as it is written in C, waits for: told by the object that is called."""

from __future__ import annotations

import _thread
import ast
import io
import os
import select
import socket
import time
from queue import SimpleQueue
from types import FrameType
from typing import Any

from torchdebug_magics.probing.source.call_sites import MISSING, calls_on_line, names_of, node_at, value_of
from torchdebug_magics.probing.waits.waiting import Waiting

__all__ = ["LOCKS", "builtin_wait", "called_name"]

LOCKS: tuple[type, ...] = (_thread.LockType, type(_thread.RLock()))
_WAITS_FOR_CHILD = frozenset({"waitpid", "waitid", "wait", "wait3", "wait4"})
_SELECTS = frozenset({"select", "poll"})
_SOCKET = frozenset({"recv", "recv_into", "recvfrom", "accept", "connect", "sendall", "send"})
_FILE = frozenset({"read", "readline", "readlines", "readinto", "read1", "write", "flush", "open"})


def builtin_wait(frame: FrameType) -> Waiting | None:
    """Of the innermost frame of a thread; None where it runs, or where what it calls cannot be told."""
    names = names_of(frame)
    node = node_at(frame)
    for candidate in [node] if node is not None else calls_on_line(frame):
        waiting = _of_call(candidate, frame, names) if isinstance(candidate, ast.Call) else _of_with(candidate, frame, names)
        if waiting is not None:
            return waiting
    return None


def called_name(frame: FrameType) -> str:
    """What the frame calls, as it is written: ``"torch.mm"``; empty where that is not known."""
    node = node_at(frame)
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _of_with(node: ast.expr, frame: FrameType, names: dict[str, Any]) -> Waiting | None:
    """``with lock:``, whose entering has no call in the source."""
    return _named_lock(_lock(value_of(node, frame, names), None), node)


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
        return _named_lock(_lock(held, _timeout(node, frame, names)), node.func)
    if isinstance(held, SimpleQueue) and name == "get":
        return Waiting("queue", "queue.get()", on=held, timeout_s=_timeout(node, frame, names), facts={"get": True})
    if isinstance(held, socket.socket) and name in _SOCKET:
        return Waiting("io", "a socket", timeout_s=held.gettimeout(), facts={"network": held.family != socket.AF_UNIX})
    if isinstance(held, io.IOBase) and name in _FILE:
        return Waiting("io", _file_of(held), facts=_pipe_of(held))
    if kind.__module__ == "torch._C._distributed_c10d":
        return Waiting("collective", "a collective's wait()" if "Work" in kind.__name__ else f"the store's {name}()", facts={"op": name})
    if kind.__module__ in {"select", "selectors"}:
        return Waiting("io", "a file or socket", timeout_s=_timeout(node, frame, names))
    return None


def _file_of(file: Any) -> str:
    name = getattr(file, "name", "")
    return f"the file {name}" if isinstance(name, str) and name else "a pipe or file"


def _pipe_of(file: Any) -> dict[str, str]:
    try:
        target = os.readlink(f"/proc/self/fd/{file.fileno()}")  # noqa: PTH115 - such as "pipe:[123]"
    except (OSError, ValueError, AttributeError):
        return {}
    return {"pipe": target} if target.startswith("pipe:") else {}


def _named_lock(waiting: Waiting | None, node: ast.expr) -> Waiting | None:
    """With the name by which the user's code calls the lock."""
    held = node.value if isinstance(node, ast.Attribute) and node.attr in {"acquire", "__enter__"} else node
    if waiting is not None:
        waiting.facts["name"] = getattr(held, "attr", getattr(held, "id", ""))
    return waiting


def _lock(held: Any, timeout_s: float | None) -> Waiting | None:
    if isinstance(held, LOCKS):
        return Waiting("lock", "lock", on=held, timeout_s=timeout_s)
    module, name = type(held).__module__, type(held).__name__
    if module == "threading" and name in {"Condition", "Semaphore", "BoundedSemaphore"}:
        inner = getattr(held, "_lock", held) if name == "Condition" else held
        return Waiting("lock", "lock" if name == "Condition" else "semaphore", on=inner, timeout_s=timeout_s)
    semaphore = getattr(held, "_semlock", None)
    if module == "multiprocessing.synchronize" and semaphore is not None:
        return Waiting("lock", f"multiprocessing {name}", on=held, timeout_s=timeout_s, facts={"semaphore": getattr(semaphore, "name", "")})
    return None


def _timeout(node: ast.Call, frame: FrameType, names: dict[str, Any]) -> float | None:
    value = _argument(node, 1, "timeout", frame, names)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def _argument(node: ast.Call, place: int, name: str, frame: FrameType, names: dict[str, Any]) -> Any:
    for keyword in node.keywords:
        if keyword.arg == name:
            return value_of(keyword.value, frame, names)
    return value_of(node.args[place], frame, names) if len(node.args) > place else MISSING
