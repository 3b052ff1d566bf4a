"""What code must not touch if it is to run once more: values that give what they hold only once, and acts that reach beyond its names."""

from __future__ import annotations

import ast
import ctypes
import io
import mmap
import multiprocessing.connection
import multiprocessing.queues
import queue
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from types import ModuleType
from typing import Any

from torchdebug_magics.probing.source.syntax import last_name, nodes, root_of

_ONCE = (
    *(queue.Queue, queue.SimpleQueue, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue),
    *(multiprocessing.connection.Connection, threading.Thread, subprocess.Popen, socket.socket, bytearray, mmap.mmap),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure),
)
_MOST, _MOST_ITEMS = 20_000, 1_000
"""Objects that are looked at, and items of a container."""
_BEYOND = frozenset({
    "input", "breakpoint", "exit", "quit", "getpass", "Thread", "Timer", "Process", "Pool", "Popen", "ThreadPoolExecutor",
    "ProcessPoolExecutor",
})  # fmt: skip
"""Functions and classes that ask a person, starts what goes on beside the code, or changes what belongs to the process."""


def is_read_once(values: Iterable[object]) -> bool:
    """Whether a value, or what the user's objects and containers hold, is an iterator, a queue or shared memory."""
    todo, seen = deque(values), set[int]()
    while todo and len(seen) < _MOST:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _ONCE) or (hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)):
            return True
        if isinstance(value, Mapping):
            todo.extend(islice(value.values(), _MOST_ITEMS))
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo.extend(islice(value, _MOST_ITEMS))
        elif type(value).__module__ == "__main__":
            todo.extend(getattr(value, "__dict__", {}).values())
    return False


def reaches_beyond(names: Mapping[str, Any], *code: ast.AST) -> bool:
    """Whether code acts beyond its names: it changes a module, starts a thread, asks a person, or catches what would end it."""
    for node in nodes(ast.AST, *code):
        if isinstance(node, ast.Call) and last_name(node.func) in _BEYOND - names.keys():
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = names.get(root_of(node))
            if isinstance(owner, ModuleType) or (isinstance(owner, type) and owner.__module__ != "__main__"):
                return True
        if isinstance(node, ast.ExceptHandler) and (node.type is None or last_name(node.type) == "BaseException"):
            return True
    return False
