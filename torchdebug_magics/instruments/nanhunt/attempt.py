"""What a replay is to reach, what it saw, and whether it reached the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.layers import LayerWatch
    from torchdebug_magics.instruments.nanhunt.trace import Trace

__all__ = ["Attempt", "CannotReplay", "Replayed", "same_bits"]


class CannotReplay(Exception):  # noqa: N818 - not an error: a reason
    """Why a step's statements cannot be run again, in words for the report."""


@dataclass
class Attempt:
    """What a replay is to reach: a sink call, known by its place in the step."""

    original: tuple[torch.Tensor, ...]
    """The loss (or what was differentiated) of the bad step."""
    number: int
    """Which backward call since the step began, 1-based."""
    leaves: dict[int, torch.Tensor]
    """Leaf tensors whose gradients are put aside."""
    until_update: bool = False
    """Whether to go on to the optimizer's step, for what happens to gradients after backward()."""


@dataclass
class Replayed:
    """What a replay saw."""

    trace: Trace
    losses: tuple[torch.Tensor, ...] = ()
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the id of the leaf, written as text, or the place in a result of ``autograd.grad``."""
    reproduced: bool | None = None
    problem: str = ""
    outputs: tuple[torch.Tensor, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)
    """The variables of the replayed statements, to name tensors by."""
    layers: LayerWatch | None = None
    finished: bool = False


def same_bits(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit, one NaN being as good as another."""
    return len(left) == len(right) and all(
        one.shape == other.shape and one.dtype is other.dtype and bool(torch.equal(_bits(one), _bits(other)))
        for one, other in zip(left, right, strict=False)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return torch.stack(
        [
            plain.nan_to_num(0.0, posinf=0.0, neginf=0.0),
            *(test(plain).to(plain.dtype) for test in (torch.isnan, torch.isposinf, torch.isneginf)),
        ]
    )
