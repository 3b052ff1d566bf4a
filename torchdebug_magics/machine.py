"""What this machine offers, found out without importing torch or initialising CUDA."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from torchdebug_magics.format import byte_size

__all__ = ["device", "gpus", "memory_limit", "smallest_limit", "versions"]

_PACKAGES = ("torch", "ipython", "ipykernel", "ipywidgets", "matplotlib")
# cgroup v1 writes about 2^63 where there is no limit.
_NO_LIMIT = 1 << 60


def versions() -> str:
    """Python and the packages that matter, as installed."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name) or 'missing'}" for name in _PACKAGES)])


def device() -> str:
    """The GPUs and their driver, or why there is none."""
    if sys.platform == "darwin":
        return "Apple GPU through MPS" if platform.machine() == "arm64" else "CPU: no CUDA on macOS"
    build = _version("torch") or ""
    if build.endswith("+cpu"):
        return f"CPU: torch {build} is built without CUDA"
    try:
        found = _nvidia()
    except Exception as error:  # noqa: BLE001 - NVML's errors are its own; each means that there is nothing to see
        return f"CPU: no NVIDIA driver to be seen ({error})"
    return found or "CPU: the NVIDIA driver lists no GPU"


def memory_limit(root: Path = Path("/")) -> str:
    """The tightest of container, process and machine, in words."""
    limit = smallest_limit(root)
    return "unknown" if limit is None else f"{byte_size(limit[0])} ({limit[1]})"


def smallest_limit(root: Path = Path("/")) -> tuple[int, str] | None:
    """(bytes, whose) of the tightest of container, process and machine: what the kernel is killed at; None where none is known."""
    return min([*_cgroup(root), *_process(), *_host()], default=None)


def gpus() -> list[tuple[int, str]]:
    """(bytes, name) of each NVIDIA GPU, as the driver tells; CUDA is not initialised. Empty where there is none."""
    try:
        return _gpus()[0]
    except Exception:  # noqa: BLE001 - NVML's errors are its own; each means that there is nothing to see
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia() -> str:
    found, driver = _gpus()
    return "; ".join(f"{name}, {byte_size(size_bytes)}" for size_bytes, name in found) + f" (driver {driver})" if found else ""


def _gpus() -> tuple[list[tuple[int, str]], str]:
    import pynvml  # noqa: PLC0415 - only when asked; it reads the driver and makes no CUDA context

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = [(int(pynvml.nvmlDeviceGetMemoryInfo(one).total), _text(pynvml.nvmlDeviceGetName(one))) for one in handles]
        return found, _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cgroup(root: Path) -> Iterator[tuple[int, str]]:
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _walk(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _walk(top: Path, path: str, name: str) -> Iterator[tuple[int, str]]:
    # An ancestor may be the one that binds; inside a container the path names the host's tree, and only the top is there.
    parts = [part for part in path.split("/") if part not in {"", ".."}]
    for depth in range(len(parts), -1, -1):
        text = _read(top.joinpath(*parts[:depth], name)) or ""
        if text.isdigit() and int(text) < _NO_LIMIT:
            yield int(text), "container limit"


def _process() -> Iterator[tuple[int, str]]:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft not in {resource.RLIM_INFINITY, -1}:
        yield soft, "address space limit of this process"


def _host() -> Iterator[tuple[int, str]]:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the whole machine"
        return
    try:
        import psutil  # noqa: PLC0415 - only when asked
    except ImportError:
        return
    yield psutil.virtual_memory().total, "the whole machine"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
