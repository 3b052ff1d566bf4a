"""Overflow that a GradScaler skips by design, told from one that would happen at scale 1 too."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

__all__ = ["at_scale_one", "live_scalers", "skips"]


def live_scalers() -> list[Any]:
    """Every enabled scaler that has scaled something."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), GradScaler) and getattr(one, "_enabled", False) and isinstance(one._scale, torch.Tensor)
    ]


@contextlib.contextmanager
def at_scale_one(scalers: list[Any]) -> Iterator[None]:
    """The scalers multiply by 1 inside, by what they did outside."""
    before = [scaler._scale for scaler in scalers]
    try:
        for scaler, scale in zip(scalers, before, strict=False):
            scaler._scale = torch.ones_like(scale)
        yield
    finally:
        for scaler, scale in zip(scalers, before, strict=False):
            scaler._scale = scale


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler told this (fused) optimizer to skip its step."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())
