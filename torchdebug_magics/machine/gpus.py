"""What the NVIDIA driver tells of the GPUs that torch would see. No CUDA context is made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchdebug_magics.format import byte_size
from torchdebug_magics.machine.limits import smallest_limit

_PACKAGES = ("torch", "ipython", "ipykernel", "ipywidgets", "matplotlib")


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance, as it is now."""

    name: str
    uuid: str
    used_bytes: int
    """By all processes, and by the driver itself."""
    total_bytes: int
    processes: tuple[tuple[int, int | None], ...] | None
    """(pid, bytes), as the driver numbers processes: inside a container, by other numbers than ours. None where it does not tell."""

    @property
    def others_bytes(self) -> int | None:
        """What other processes use, if this one uses the GPU; None where the driver's list does not tell them from us."""
        if self.processes is None:
            return None
        own = [pid for pid, _ in self.processes if pid == os.getpid()]
        others = [size_bytes for pid, size_bytes in self.processes if not own or pid not in own]
        if not own and len(others) == 1:  # in a container: one process alone is ours
            return 0
        return None if not own or None in others else sum(size_bytes or 0 for size_bytes in others)


class Gpus:
    """Opens the driver's library once; each reading is then two calls a GPU. Every error of the library becomes `problem`, in one line."""

    def __init__(self) -> None:
        self.problem = ""
        """Why there is nothing to be seen, or not all of it."""
        self.driver = ""
        self._nvml: Any = None
        self._known: tuple[tuple[Any, str, str], ...] = ()

    def __enter__(self) -> Self:
        try:
            import pynvml  # noqa: PLC0415 - only when asked
        except ImportError:
            self.problem = "no NVIDIA driver can be asked: the package nvidia-ml-py is missing"
            return self
        try:
            pynvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - NVML's errors are its own; each means that there is nothing to see
            self.problem = f"no NVIDIA driver to be seen ({_one_line(error)})"
            return self
        self._nvml = pynvml
        try:
            self.driver = _text(pynvml.nvmlSystemGetDriverVersion())
            self._known = tuple(
                (handle, _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))) for handle in self._visible()
            )
        except Exception as error:  # noqa: BLE001 - as above
            self.problem = f"the NVIDIA driver does not answer ({_one_line(error)})"
        if not self._known and not self.problem:
            wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
            named = f"CUDA_VISIBLE_DEVICES={wanted!r} names no GPU of this machine"
            self.problem = "the NVIDIA driver lists no GPU" if wanted is None else named
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._nvml is not None:
            self._answer("nvmlShutdown")  # a driver that is gone has nothing left to close
        self._nvml, self._known = None, ()

    def read(self) -> list[Gpu]:
        """The GPUs now, in the order in which CUDA numbers them where CUDA_VISIBLE_DEVICES names them."""
        return [gpu for known in self._known if (gpu := self._read(*known)) is not None]

    def _read(self, handle: Any, name: str, uuid: str) -> Gpu | None:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except Exception as error:  # noqa: BLE001 - as above
            self.problem = f"{name} cannot be read ({_one_line(error)})"
            return None
        running = self._answer("nvmlDeviceGetComputeRunningProcesses", handle)
        # Windows, and a GPU that is split into MIG instances, do not tell how much each uses.
        used = None if running is None else tuple((int(one.pid), one.usedGpuMemory and int(one.usedGpuMemory)) for one in running)
        return Gpu(name, uuid, int(memory.used), int(memory.total), used)

    def _answer(self, call: str, *values: Any) -> Any:
        """What a function of the library returns; None where the driver is old, permission is missing, or the answer is "no such thing"."""
        try:
            return getattr(self._nvml, call)(*values)
        except Exception:  # noqa: BLE001 - as above
            return None

    def _visible(self) -> Iterator[Any]:
        """As CUDA reads CUDA_VISIBLE_DEVICES: up to the first name that means nothing."""
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(at) for at in range(self._nvml.nvmlDeviceGetCount())]
        named = handles if wanted is None else (self._named(name.strip(), handles) for name in wanted.split(","))
        return map(self._instance, takewhile(lambda handle: handle is not None, named))

    def _named(self, name: str, handles: Sequence[Any]) -> Any:
        if name.startswith("MIG-"):
            return self._answer("nvmlDeviceGetHandleByUUID", name)
        if name.startswith("GPU-"):  # any beginning that fits only one will do
            fitting = [handle for handle in handles if _text(self._nvml.nvmlDeviceGetUUID(handle)).startswith(name)]
            return fitting[0] if len(fitting) == 1 else None
        return handles[int(name)] if name.isdigit() and int(name) < len(handles) else None

    def _instance(self, handle: Any) -> Any:
        """Of a GPU that is split into MIG instances, the first: the one that CUDA takes."""
        is_split = (self._answer("nvmlDeviceGetMigMode", handle) or (False,))[0]
        places = range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_split else 0)
        instances = (self._answer("nvmlDeviceGetMigDeviceHandleByIndex", handle, at) for at in places)
        return next((instance for instance in instances if instance is not None), handle)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
