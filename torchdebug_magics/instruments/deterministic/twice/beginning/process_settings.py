"""What holds for the whole process and no variable leads to: the working folder, the path of imports, torch's own settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torchdebug_magics.probing.guard import Guard

__all__ = ["SETTINGS", "Process", "Setting"]


def _device() -> Any:
    """None where nobody has set it: to set it, even to the same one, puts a mode under all that follows."""
    context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    held = getattr(context, "device_context", None)
    return None if held is None else held.device


class Setting(NamedTuple):
    """One of them."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    line: str = ""
    """What the user writes to set it, with `{!r}` for the value; empty where no number depends on it."""


def _items(held: list[Any]) -> Setting:
    return Setting(lambda: list(held), lambda items: held.__setitem__(slice(None), items))


SETTINGS: Mapping[str, Setting] = {
    "the working folder": Setting(os.getcwd, os.chdir, "os.chdir({!r})"),
    "the default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype, "torch.set_default_dtype({!r})"),
    "the default device": Setting(_device, torch.set_default_device, "torch.set_default_device({!r})"),
    "the grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled, "torch.set_grad_enabled({!r})"),
    "anomaly detection": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the number of threads": Setting(torch.get_num_threads, torch.set_num_threads, "torch.set_num_threads({!r})"),
    "the recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
}


class Process:
    """As it is at one moment."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        lists: dict[str, list[Any]] = {"the path of imports": sys.path, "the arguments": sys.argv, "the callbacks of gc": gc.callbacks}
        self._settings = {**SETTINGS, **{name: _items(held) for name, held in lists.items()}}
        self._values = {name: guard.run(f"reading {name}", read) for name, (read, *_) in self._settings.items()}

    def put_back(self) -> None:
        """What has changed, and no more."""
        for name, (read, write, _) in self._settings.items():
            self._guard.run(f"putting back {name}", self._write, name, read, write)

    def _write(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        if read() != self._values[name]:
            write(self._values[name])
