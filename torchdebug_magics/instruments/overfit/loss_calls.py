"""Calls of PyTorch's loss functions: what they were given, and the values that their result can be compared with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics.report import Location

__all__ = ["CLASSES", "DISTANCES", "LOSSES", "LossCall", "bound", "is_probabilities"]

CLASSES = (F.cross_entropy, F.nll_loss)
_BINARY = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
DISTANCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
LOSSES: tuple[Any, ...] = (*CLASSES, *_BINARY, *DISTANCES, F.kl_div)
_NEAR = 1e-3


@dataclass(frozen=True, eq=False)
class LossCall:
    """One call; tensors are detached, and share memory with the step's."""

    function: Callable[..., Any]
    input: Tensor
    target: Tensor
    options: dict[str, Any]
    location: Location | None
    value: float
    """NaN where the result is not a scalar."""

    @property
    def name(self) -> str:
        """``cross_entropy``."""
        return self.function.__name__

    @property
    def is_classes(self) -> bool:
        """Whether the target holds class indices."""
        return self.function in CLASSES and not self.target.is_floating_point()

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.input.shape[1] if self.input.dim() > 1 else self.input.shape[-1] if self.input.dim() else 1

    @property
    def labels(self) -> Tensor:
        """Class indices without those that are ignored."""
        return self.target[self.target != self.options.get("ignore_index", -100)].flatten()

    @property
    def size(self) -> float:
        """How many times the mean the result is."""
        if self.options.get("reduction", "mean") == "mean":
            return 1.0
        return float(len(self.labels) if self.is_classes else max(1, self.target.numel()))

    def floor(self) -> float:
        """The least mean loss for these targets."""
        if self.is_classes:
            smoothing = float(self.options.get("label_smoothing") or 0.0)
            return _entropy_of_smoothed(smoothing, self.classes) if smoothing else 0.0
        if self.function in CLASSES:
            return float(-torch.special.xlogy(self.target, self.target).sum(1).mean()) if self.function is F.cross_entropy else 0.0
        if self.function in _BINARY:
            target = self.target.float().clamp(0, 1)
            return float((-torch.special.xlogy(target, target) - torch.special.xlogy(1 - target, 1 - target)).mean())
        return 0.0

    def chance(self) -> float | None:
        """The mean loss of the prediction that knows nothing: equal shares for classes, the mean of the targets for distances."""
        if self.function in CLASSES:
            return math.log(max(2, self.classes))
        if self.function in _BINARY:
            return math.log(2)
        if self.function in DISTANCES:
            target = self.target.float()
            at = target.mean() if self.function is not F.l1_loss else target.median()
            return float(self.function(at.expand_as(target), target)) or None
        return None

    def known_values(self) -> dict[str, float]:
        """Losses at which a faulty training stalls, by what they are called."""
        if not self.is_classes or not len(self.labels):
            return {}
        many = self.classes
        shares = self.labels.bincount().float() / len(self.labels)
        entropy = float(-torch.special.xlogy(shares, shares).sum())
        named = {
            f"ln {many} = {math.log(many):.4g}: equal shares for all classes": math.log(many),
            f"ln(1 + {many - 1}/e) = {math.log(1 + (many - 1) / math.e):.4g}: softmax applied twice": math.log(1 + (many - 1) / math.e),
            f"{entropy:.4g}: the entropy of the labels, as if the input were not known": entropy,
        }
        return {name: value for name, value in named.items() if value > 0}


def bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: what was passed, and the defaults."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    given.apply_defaults()
    return dict(given.arguments)


def is_probabilities(values: Tensor, dim: int = 1) -> bool:
    """Whether the numbers are shares that sum to 1 over the dimension of classes."""
    if values.dim() <= dim or values.shape[dim] < 2 or not values.numel():  # noqa: PLR2004 - one class alone is no distribution
        return False
    values = values.float()
    return bool((values >= 0).all()) and bool(((values.sum(dim) - 1).abs() < _NEAR).all())


def _entropy_of_smoothed(smoothing: float, classes: int) -> float:
    rest = smoothing / classes
    peak = 1 - smoothing + rest
    return -peak * math.log(peak) - (classes - 1) * rest * math.log(rest)
