"""Functions whose answer is different each time, by what makes it so."""

from __future__ import annotations

import functools
import io
import random
import sys
import time
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdebug_magics.probing.where import frames_above, is_user_code, owner

if TYPE_CHECKING:
    from torchdebug_magics.instruments.deterministic.origin.statements import Called

__all__ = ["FILE_READS", "FILE_WRITES", "asked_in_c", "asked_in_python", "called_from", "global_numpy", "unseeded"]

_CLOCKS = frozenset(
    {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns"}
    | {"thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "ctime", "strftime"}
)
_SYSTEM = frozenset({"getpid", "getenv", "listdir", "scandir", "stat", "getloadavg", "cpu_count", "times"})
FILE_READS = frozenset({"read", "readline", "readlines", "readinto", "__next__"})
FILE_WRITES = frozenset({"write", "writelines"})
_NUMPY = frozenset({"default_rng", "SeedSequence", "RandomState", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
_NAMES = _CLOCKS | _SYSTEM | FILE_READS | {"now", "utcnow", "today", "urandom", "getrandom", "seed", "id", "hash", "next", "input", "open"}


def asked_in_c(function: Any, frame: FrameType) -> tuple[str, str]:  # noqa: PLR0911 - a table of who is asked
    """(name, cause) of a function that is written in C; empty for most."""
    name = function.__name__
    if name not in _NAMES:
        return "", ""
    holder = function.__self__
    where = getattr(holder, "__name__", "")
    if name in _CLOCKS and holder is time:
        return f"time.{name}", "wall_clock"
    if name in {"now", "utcnow", "today"} and where in {"datetime", "date"}:
        return f"{where}.{name}", "wall_clock"
    if name in {"urandom", "getrandom"}:
        return f"os.{name}", "os_entropy"
    if name == "seed" and isinstance(holder, torch.Generator):
        return "torch.Generator.seed", "unseeded_generator"
    if where == "builtins":
        causes = {"id": "hash_order", "hash": "hash_order", "next": "state_leak", "input": "outside_data"}
        return (name, causes[name]) if name in causes and is_user_code(frame.f_code) else ("", "")
    if name in _SYSTEM and where in {"posix", "nt", "os"}:
        return f"os.{name}", "outside_data"
    if name in FILE_READS and isinstance(holder, io.IOBase):
        return f"file.{name}", "outside_data"
    return "", ""


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
    function = getattr(outermost.f_code, "co_qualname", outermost.f_code.co_name)
    return f"{outermost.f_globals.get('__name__', '')}.{function}", distance


def unseeded(calls: Iterable[Called], frame: FrameType) -> Iterator[tuple[str, int]]:
    """Calls of NumPy's that take a seed from the system, by name and line: they are written in a way that no profiler sees."""
    for called in calls:
        if called.path and (called.is_bare or _is_none(called.arguments, frame)) and _is_numpys(_object(called.path, frame)):
            yield called.path, called.line


def _is_numpys(function: Any) -> bool:
    """Whether it takes its seed from the operating system when it is given none."""
    numpy = sys.modules.get("numpy")
    if numpy is None or getattr(function, "__name__", "") not in _NUMPY | {"seed"}:
        return False
    return getattr(numpy.random, function.__name__, None) is function


def global_numpy(function: Any) -> Any:
    """NumPy's own generator, for a function that seeds it; else None."""
    numpy = sys.modules.get("numpy")
    return getattr(numpy.random.mtrand, "_rand", None) if numpy is not None and function is numpy.random.seed else None


def _object(path: str, frame: FrameType) -> Any:
    root, *parts = path.split(".")
    value = frame.f_locals.get(root, frame.f_globals.get(root))
    # Through modules only: no attribute of the user's is asked for.
    return functools.reduce(lambda held, part: vars(held).get(part) if hasattr(held, "__file__") else None, parts, value)


def _is_none(arguments: tuple[str, ...], frame: FrameType) -> bool:
    return len(arguments) == 1 and arguments[0] in frame.f_locals and frame.f_locals[arguments[0]] is None
