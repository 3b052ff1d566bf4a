"""Seeds that wait for a device that was not started yet: torch keeps the last ones, and uses them when the device starts."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["QueuedSeeds"]

_FIRST_SEED = 67280421310721
"""With which torch begins the generator of a device that nobody has seeded."""
_FIELDS = ("manual_seed_all_cb", "manual_seed_cb", "call_order")


class QueuedSeeds:
    """What waited at one moment for CUDA, and for Intel's GPUs."""

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[Any, ...]] = {}

    def take(self) -> None:
        """Of the devices that are not started."""
        self._waiting = {device: _queue(device) for device in (torch.cuda, torch.xpu) if not device.is_initialized()}

    def put_back(self) -> None:
        """Let the same wait again; of a device that was started meanwhile, let them be its seeds."""
        for device, waiting in self._waiting.items():
            if device.is_initialized():
                _begin(device, waiting[-1])
            else:
                for field, value in zip(_FIELDS, waiting, strict=True):
                    setattr(device._lazy_seed_tracker, field, value)

    def are_back(self) -> bool:
        """Whether the same wait; a device that was started is asked for nothing."""
        return all(device.is_initialized() or _queue(device) == waiting for device, waiting in self._waiting.items())


def _queue(device: Any) -> tuple[Any, ...]:
    return tuple(getattr(device._lazy_seed_tracker, field) for field in _FIELDS)


def _begin(device: Any, calls: list[Any]) -> None:
    device.manual_seed_all(_FIRST_SEED)
    for call in filter(None, calls):
        call[0]()
