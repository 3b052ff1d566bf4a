"""Whose code a frame runs, and its local values; usable in a process that has not imported torch."""

from __future__ import annotations

import functools
import gc
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias

Owner: TypeAlias = Literal["user", "library", "torch", "own", "python"]

_SPEC = importlib.util.find_spec("torch")
_TORCH = str(Path(_SPEC.origin).parent) if _SPEC is not None and _SPEC.origin else "<no torch>"
_OWN = str(Path(__file__).parent.parent.parent)
_PYTHON = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_SNAPSHOTS = sys.version_info < (3, 13)
"""Before, a function's `f_locals` is a dict that the frame keeps, and that keeps alive what it holds."""
_MADE_BY_TORCH = "<eval_with_key>"
"""Functions that a compiler of torch's wrote."""
_COMPILED = "/torchinductor_"
"""Folders of files that it wrote."""
_PACKAGES = ("/site-packages/", "/dist-packages/")


@functools.lru_cache(maxsize=4096)
def owner(filename: str) -> Owner:
    """Whose code a file is."""
    path = filename.replace("\\", "/")
    if path.startswith((_TORCH, _MADE_BY_TORCH)) or _COMPILED in path:
        return "torch"
    if path.startswith(_OWN):
        return "own"
    if any(mark in path for mark in _PACKAGES):
        return "library"
    if path.startswith(_PYTHON) or path.startswith("<frozen"):
        return "python"
    return "user"


def is_user_code(code: CodeType) -> bool:
    """Whether the code was written by the user and not installed."""
    return owner(code.co_filename) == "user"


def is_module_code(code: CodeType) -> bool:
    """Whether it is that of a module or a cell, whose names are global; IPython has called cells otherwise for a while."""
    return code.co_name == "<module>" or code.co_name.startswith("<cell line")


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local_values(frame: FrameType, names: frozenset[str] | None = None) -> dict[str, Any]:
    """A frame's local variables, all or those of `names`; the frame holds nothing more than before."""
    before = gc.get_referents(frame) if _SNAPSHOTS and frame.f_code.co_flags & CO_OPTIMIZED else []
    held = frame.f_locals
    found = dict(held) if names is None else {name: held[name] for name in names if name in held}
    if _SNAPSHOTS and frame.f_code.co_flags & CO_OPTIMIZED:
        # A snapshot that nobody else has seen is emptied: we and the frame hold it. Under a tracer, it would be written back.
        is_new = not any(one is held for one in before) and sys.getrefcount(held) <= 3  # noqa: PLR2004 - here, the argument, the frame
        if is_new and frame.f_trace is None and sys.gettrace() is None and getattr(threading, "_trace_hook", None) is None:
            held.clear()
    return found
