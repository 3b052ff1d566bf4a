"""Functions whose answer is different each time, by what makes it so."""

from __future__ import annotations

import functools
import io
import random
import sys
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch
from torch import serialization
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdebug_magics.instruments.deterministic.origin.line_statements import Called
from torchdebug_magics.probing.source.code_owner import frames_above, is_user_code, owner

_CLOCKS = frozenset(
    {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns"}
    | {"thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "ctime", "strftime"}
)
_DATES = {(where, name): f"{where}.{name}" for where in ("datetime", "date") for name in ("now", "utcnow", "today")} | {
    ("_uuid", "generate_time_safe"): "uuid.uuid1"
}
_SYSTEM = frozenset({"getpid", "getenv", "listdir", "scandir", "stat", "getloadavg", "cpu_count", "times", "read"})
FILE_READS = frozenset({"read", "readline", "readlines", "readinto", "__next__"})
FILE_WRITES = frozenset({"write", "writelines"})
SAVED = serialization._open_zipfile_writer_file.__init__.__code__
"""What `torch.save` writes a file with, which goes by its name alone."""
_NUMPY = frozenset({"default_rng", "SeedSequence", "RandomState", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
OF_TORCH = "torch.random"
"""How torch's own generator is called, as NumPy's is `np.random`."""
_UNWRITTEN = frozenset({"empty", "empty_like", "ndarray"})
_WAITING = frozenset({"threading", "queue", "concurrent", "multiprocessing", "asyncio", "selectors", "subprocess", "socket"})
"""Modules that look at the clock only to know how long they have waited."""
_HANDING = {
    ("queue", "get"): "queue.Queue.get",
    ("concurrent.futures._base", "as_completed"): "as_completed",
    ("concurrent.futures._base", "wait"): "concurrent.futures.wait",
    ("multiprocessing.pool", "next"): "imap_unordered",
    ("multiprocessing.queues", "get"): "multiprocessing.Queue.get",
    ("asyncio.tasks", "_wait_for_one"): "asyncio.as_completed",
    ("asyncio.tasks", "wait"): "asyncio.wait",
}
OF_THREADS = frozenset({"queue.SimpleQueue.get", *_HANDING.values()})
"""Who hands over what comes first; in `_HANDING` by module and name."""
_BUILTINS = {"id": "hash_order", "hash": "hash_order", "next": "state_leak", "input": "outside_data"}
_NAMES = (
    _CLOCKS
    | _SYSTEM
    | FILE_READS
    | _BUILTINS.keys()
    | {"now", "utcnow", "today", "urandom", "getrandom", "seed", "get", "generate_time_safe"}
)


def asked_in_c(function: Any, frame: FrameType) -> tuple[str, str]:  # noqa: PLR0911 - a table of who is asked
    """(name, cause) of a function that is written in C; empty for most."""
    name = function.__name__
    if name not in _NAMES:
        return "", ""
    holder = function.__self__
    where = getattr(holder, "__name__", "")
    if name in _CLOCKS and holder is time:
        return ("", "") if _is_waiting(frame) else (f"time.{name}", "wall_clock")
    if (where, name) in _DATES:
        return _DATES[where, name], "wall_clock"
    if name in {"urandom", "getrandom"}:
        return f"os.{name}", "os_entropy"
    if name == "seed" and isinstance(holder, torch.Generator):
        return "torch.Generator.seed", "unseeded_generator"
    if where == "builtins":
        return (name, _BUILTINS[name]) if name in _BUILTINS and is_user_code(frame.f_code) else ("", "")
    if name == "get":
        return ("queue.SimpleQueue.get", "outside_data") if isinstance(holder, SimpleQueue) else ("", "")
    if name in _SYSTEM and where in {"posix", "nt", "os"}:
        return f"os.{name}", "outside_data"
    if name in FILE_READS and isinstance(holder, io.IOBase):
        return f"file.{name}", "outside_data"
    return "", ""


def _is_waiting(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return module in _WAITING and frame.f_code.co_name != "time"  # the one of an event loop is asked by others


_CODES: dict[CodeType, tuple[str, str]] = {
    torch.seed.__code__: ("torch.seed", "unseeded_generator"),
    _MultiProcessingDataLoaderIter.__init__.__code__: ("DataLoader", "worker_seed"),
}
_BY_NAME = {
    ("subprocess", "run"): ("subprocess.run", "outside_data"),
    ("subprocess", "check_output"): ("subprocess.check_output", "outside_data"),
    ("subprocess", "__init__"): ("subprocess.Popen", "outside_data"),
    ("os", "getenv"): ("os.getenv", "outside_data"),
    ("socket", "create_connection"): ("socket.create_connection", "outside_data"),
    ("urllib.request", "urlopen"): ("urllib.request.urlopen", "outside_data"),
    ("ipykernel.kernelbase", "raw_input"): ("input", "outside_data"),
    **{known: (name, "outside_data") for known, name in _HANDING.items()},
}
_PYTHON_NAMES = frozenset(name for _, name in _BY_NAME)


def asked_in_python(frame: FrameType) -> tuple[str, str]:
    """As `asked_in_c`, of a function that is written in Python and was entered just now."""
    code = frame.f_code
    if code is random.Random.seed.__code__:
        if frame.f_locals.get("a") is not None or isinstance(frame.f_locals.get("self"), random.SystemRandom):
            return "", ""
        caller = frame.f_back
        is_new = caller is not None and caller.f_code is random.Random.__init__.__code__
        return ("random.Random" if is_new else "random.seed"), "python_random"
    if code in _CODES:
        return _CODES[code]
    if code.co_name in _PYTHON_NAMES:
        return _BY_NAME.get((frame.f_globals.get("__name__", ""), code.co_name), ("", ""))
    return "", ""


def called_from(frame: FrameType, user: FrameType, name: str) -> tuple[str, int]:
    """The name of what the user's line itself called, where that is Python's own; and how far away from the line it was asked.

    0 is the line itself, 1 is within Python's library, 2 is within another.
    """
    outermost, distance = None, 0
    for one in frames_above(frame):
        if one is user:
            break
        whose = owner(one.f_code.co_filename)
        distance = max(distance, {"user": 0, "python": 1}.get(whose, 2))
        outermost = outermost if whose == "user" else one
    if outermost is None or distance != 1 or not name.startswith("os."):
        return name, distance
    function = outermost.f_code.co_qualname
    return f"{outermost.f_globals.get('__name__', '')}.{function}", distance


def asked_by_name(calls: Iterable[Called], frame: FrameType) -> Iterator[tuple[str, str, int]]:
    """Calls, mostly of NumPy's, that give something else each time, by name, cause and line: those that no profiler sees."""
    numpy = sys.modules.get("numpy")
    for called in calls:
        function = _object(called.path, frame) if called.path else None
        name = getattr(function, "__name__", "")
        if isinstance(function, functools.partial) and isinstance(function.func, BuiltinFunctionType):
            name, cause = asked_in_c(function.func, frame)  # which no profiler sees either
            if name:
                yield name, cause, called.line
        elif name in _UNWRITTEN and getattr(numpy, name, None) is function and "buffer" not in called.text:
            yield called.path, "uninitialized_memory", called.line
        elif (called.is_bare or _is_none(called.arguments, frame)) and _seeds_itself(function, name):
            yield called.path, "numpy_random", called.line


def _seeds_itself(function: Any, name: str) -> bool:
    """Whether it takes its seed from the operating system when it is given none."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and name in _NUMPY | {"seed"} and getattr(numpy.random, name, None) is function


def global_generator(function: Any) -> tuple[str, Any]:
    """The generator that a library draws from by itself and how it is called after the library, for a function that seeds it; else None."""
    if function is torch.manual_seed or function is torch.seed:
        return OF_TORCH, torch.default_generator
    numpy = sys.modules.get("numpy")
    return "", getattr(numpy.random.mtrand, "_rand", None) if numpy is not None and function is numpy.random.seed else None


def _object(path: str, frame: FrameType) -> Any:
    root, *parts = path.split(".")
    value = frame.f_locals.get(root, frame.f_globals.get(root))
    # Through modules only: no attribute of the user's is asked for.
    return functools.reduce(lambda held, part: vars(held).get(part) if hasattr(held, "__file__") else None, parts, value)


def _is_none(arguments: tuple[str, ...], frame: FrameType) -> bool:
    return len(arguments) == 1 and arguments[0] in frame.f_locals and frame.f_locals[arguments[0]] is None
