"""What torch's own allocators hold on CUDA, ROCm, Intel and Apple devices, without initialising any of them.

Torch is never imported here: a gauge that did so would show mostly that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_TORCH_NAMES = {"GPU": "cuda", "XPU": "xpu", "MPS": "mps"}
"""By the first word of a label."""


@dataclass(frozen=True)
class Allocator:
    """One device, as torch's allocator for it counts."""

    number: int
    """Torch's, which may be another than the driver's."""
    label: str
    uuid: str
    allocated_bytes: int
    """In tensors."""
    reserved_bytes: int
    """Taken from the driver, tensors included."""
    total_bytes: int | None
    peak_bytes: int
    """The most in tensors since the process began, or since somebody reset torch's counter; 0 where it has none."""
    peak_reserved_bytes: int = 0

    @property
    def device(self) -> str:
        """As torch writes it, such as ``cuda:0``."""
        return f"{_TORCH_NAMES[self.label.partition(' ')[0]]}:{self.number}"


class Allocators:
    """Reads every device that this process uses. The device's properties are asked once."""

    def __init__(self) -> None:
        self._properties: dict[int, tuple[str, str, int]] = {}

    @property
    def built_without(self) -> str:
        """Why torch here can use no GPU at all; empty where it could, or is not imported."""
        torch = _torch()
        version = getattr(torch, "version", None)
        if version is None or version.cuda or version.hip or _is_apple(torch) or getattr(version, "xpu", None):
            return ""
        return f"none: torch {version.__version__} is built for the CPU alone"

    def read(self) -> list[Allocator]:
        """All devices as they are now; empty where none is initialised."""
        torch = _torch()
        if torch is None:
            return []
        if torch.cuda.is_initialized():
            return list(self._cuda(torch))
        if torch.xpu.is_initialized():
            return list(_xpu(torch))
        return list(_mps(torch)) if _is_apple(torch) else []

    def of(self, at: int, uuid: str, found: list[Allocator]) -> Allocator | None:
        """The one for a GPU of the driver's: CUDA may number them in another order."""
        same = [one for one in found if one.uuid and one.uuid in uuid]
        return same[0] if same else found[at] if at < len(found) and not found[at].uuid else None

    def current(self, found: list[Allocator]) -> Allocator | None:
        """The one for the device that torch uses where none is named."""
        torch = _torch()
        number = torch.cuda.current_device() if found and torch.cuda.is_initialized() else 0
        return next((one for one in found if one.number == number), None)

    def _cuda(self, torch: Any) -> Iterator[Allocator]:
        for at in range(torch.cuda.device_count()):
            if at not in self._properties:
                known = torch.cuda.get_device_properties(at)
                self._properties[at] = (known.name, str(getattr(known, "uuid", "")), int(known.total_memory))
            name, uuid, total_bytes = self._properties[at]
            stats = torch.cuda.memory_stats_as_nested_dict(at)
            allocated, reserved = (stats.get(key, {}).get("all", {}) for key in ("allocated_bytes", "reserved_bytes"))
            now = (int(allocated.get("current", 0)), int(reserved.get("current", 0)))
            peaks = (int(allocated.get("peak", 0)), int(reserved.get("peak", 0)))
            yield Allocator(at, f"GPU {at} · {name}", uuid, *now, total_bytes, *peaks)


def _torch() -> Any:
    """As the user has imported it, and not while that still goes on in another thread."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch


def _xpu(torch: Any) -> Iterator[Allocator]:
    for at in range(torch.xpu.device_count()):
        known = torch.xpu.get_device_properties(at)
        now = (torch.xpu.memory_allocated(at), torch.xpu.memory_reserved(at))
        peaks = (torch.xpu.max_memory_allocated(at), torch.xpu.max_memory_reserved(at))
        yield Allocator(at, f"XPU {at} · {known.name}", "", *now, int(known.total_memory), *peaks)


def _mps(torch: Any) -> Iterator[Allocator]:
    allocated_bytes = torch.mps.current_allocated_memory()
    if allocated_bytes:  # it has no word for "not initialised"
        yield Allocator(0, "MPS", "", allocated_bytes, torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory(), 0)


def _is_apple(torch: Any) -> bool:
    return sys.platform == "darwin" and torch.backends.mps.is_available()
