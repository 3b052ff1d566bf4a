"""How the steps of a training are made, and what is told of them while they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from torchdebug_magics.instruments.overfit.training.training import Training

__all__ = ["Progress", "Steps"]


@dataclass(frozen=True)
class Progress:
    """What the live view shows."""

    doing: str
    losses: tuple[float, ...]
    trials: tuple[tuple[str, float], ...] = ()


class Steps(Protocol):
    """How the steps of a training are made."""

    models: Mapping[str, torch.nn.Module]
    """Those that are known beforehand, by name."""

    def run(self, training: Training) -> None:
        """Call `training.begin`, make a step, and call `training.end` with its loss, until that says so."""
