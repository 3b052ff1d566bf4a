"""Overflow that a GradScaler skips by design, told from one that would happen at scale 1 too."""

from __future__ import annotations

import contextlib
import gc
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from torchdebug_magics.instruments.nanhunt.finding import here
from torchdebug_magics.instruments.nanhunt.report import Finding
from torchdebug_magics.probing.tensors import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdebug_magics.instruments.nanhunt.evidence import Context

__all__ = ["Overflows", "at_scale_one", "live_scalers", "skips"]

_COLLAPSED_RUN = 20
"""Overflow steps in a row after which a scaler is not searching any more."""


class Overflows:
    """Counts the steps that a scaler skips; too many of them are a finding of their own."""

    def __init__(self) -> None:
        self.total = 0
        self.run = 0
        """In a row, up to now."""
        self.still_there = False
        """Whether bad gradients stood there before this backward(), as in accumulation: the same skip."""

    def count(self, leaves: dict[int, torch.Tensor], context: Context) -> Finding | None:
        """One more overflow; a finding when the scale has collapsed. A scaled loss out of range alone skips nothing."""
        if self.still_there or not any(leaf.grad is not None and kind_of(leaf.grad) for leaf in leaves.values()):
            return None
        self.total += 1
        self.run += 1
        scale = min((scaler.get_scale() for scaler in live_scalers()), default=math.inf)
        if scale >= 1.0 and self.run < _COLLAPSED_RUN:
            return None
        return Finding(
            kind="inf",
            phase="backward",
            op=None,
            module=None,
            call=None,
            location=here(),
            step=context.step,
            backward=context.backward,
            diagnosis="scale_collapse",
            sink="gradient",
            sink_kind="inf",
            weights="weights untouched",
            explanation=f"the GradScaler skipped {self.run} steps in a row and its scale fell to {scale:g}: no step is taken any more",
            fix="find the op that overflows fp16 (run the cell with autocast disabled, or with bfloat16, which needs no scaler)",
        )


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
