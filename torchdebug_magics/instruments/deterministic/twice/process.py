"""What holds for the whole process and no variable leads to: the working folder, the path of imports, torch's own settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard

__all__ = ["Process"]


def _device() -> Any:
    """None where nobody has set it: to set it, even to the same one, puts a mode under all that follows."""
    context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    held = getattr(context, "device_context", None)
    return None if held is None else held.device


def _items(held: list[Any]) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: list(held), lambda items: held.__setitem__(slice(None), items)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the working folder": (os.getcwd, os.chdir),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (_device, torch.set_default_device),
    "the grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
}


class Process:
    """As it is at one moment."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        lists: dict[str, list[Any]] = {"the path of imports": sys.path, "the arguments": sys.argv, "the callbacks of gc": gc.callbacks}
        self._settings = {**_SETTINGS, **{name: _items(held) for name, held in lists.items()}}
        self._values = {name: guard.run(f"reading {name}", read) for name, (read, _) in self._settings.items()}

    def put_back(self) -> None:
        """What has changed, and no more."""
        for name, (read, write) in self._settings.items():
            self._guard.run(f"putting back {name}", self._write, name, read, write)

    def _write(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        if read() != self._values[name]:
            write(self._values[name])
