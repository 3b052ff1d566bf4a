"""What may differ from step to step, and is to be the same: random numbers and dropout."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["other_numbers", "without_dropout"]


def other_numbers() -> None:
    """Let every generator go on from another place."""
    torch.rand(1)
    random.random()  # noqa: S311 - not for secrets
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.random()


def without_dropout(model: torch.nn.Module) -> None:
    """What is dropped at random tells equal samples apart; to be undone with the training."""
    for part in model.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, (torch.nn.RNNBase, torch.nn.MultiheadAttention)):
            part.dropout = 0.0
