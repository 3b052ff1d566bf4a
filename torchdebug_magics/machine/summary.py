"""Versions, device and memory in words: what a person who helps asks for first."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

from torchdebug_magics.format import byte_size
from torchdebug_magics.machine.gpus import Gpus
from torchdebug_magics.machine.limits import smallest_limit

__all__ = ["device", "memory_limit", "versions"]

_PACKAGES = ("torch", "ipython", "ipykernel", "ipywidgets", "matplotlib")


def versions() -> str:
    """Python and the packages that matter, as installed."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name) or 'missing'}" for name in _PACKAGES)])


def device() -> str:
    """The GPUs that torch would see and their driver, or why there is none."""
    if sys.platform == "darwin":
        return "Apple GPU through MPS" if platform.machine() == "arm64" else "CPU: no CUDA on macOS"
    build = _version("torch") or ""
    if build.endswith("+cpu"):
        return f"CPU: torch {build} is built without CUDA"
    with Gpus() as gpus:
        found = "; ".join(f"{one.name}, {byte_size(one.total_bytes)}" for one in gpus.read())
    return f"{found} (driver {gpus.driver})" if found else f"CPU: {gpus.problem}"


def memory_limit(root: Path = Path("/")) -> str:
    """The smallest of container, process and machine, in words."""
    limit = smallest_limit(root)
    return "unknown" if limit is None else f"{byte_size(limit.limit_bytes)} ({limit.whose})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
