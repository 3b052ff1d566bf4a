"""Healthy trainings under many losses, of which some cannot be zero.

Their floors are known exactly, or found by a long plain training.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, healthy, made
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, classes, mlp, words

__all__ = ["CASES"]

_SMOOTH = (0.925, 0.025, 0.025, 0.025)


def _entropy(*probabilities: float) -> float:
    return -sum(p * math.log(p) for p in probabilities)


@healthy(floor=_entropy(*_SMOOTH))
def label_smoothing() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(label_smoothing=0.1), adam(model))


@healthy(floor=_entropy(0.7, 0.1, 0.1, 0.1))
def soft_targets_in_cross_entropy() -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    return made(model, (x, F.one_hot(y, 4) * 0.6 + 0.1), nn.CrossEntropyLoss(), adam(model))


@healthy()
def nll_of_log_softmax() -> Built:
    model = mlp(10, 32, 4).append(nn.LogSoftmax(dim=1))
    return made(model, classes(), nn.NLLLoss(), adam(model))


@healthy()
def nll_of_a_log_in_the_loss() -> Built:
    model = Recurrent(nn.GRU)
    return made(model, words(), lambda output, target: F.nll_loss(output.softmax(1).clamp_min(1e-9).log(), target), adam(model))


@healthy()
def bce_of_a_sigmoid() -> Built:
    model, (x, y) = mlp(10, 32, 1).append(nn.Sigmoid()), classes(2)
    return made(model, (x, y[:, None].float()), nn.BCELoss(), adam(model))


@healthy()
def multi_label() -> Built:
    model = mlp(10, 32, 5)
    return made(model, (torch.randn(8, 10), torch.randint(0, 2, (8, 5)).float()), nn.BCEWithLogitsLoss(), adam(model, 2e-2))


@healthy()
def weighted_classes() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0, 1.0])), adam(model))


@healthy()
def mean_squared_error_of_probabilities() -> Built:
    model, (x, y) = mlp(10, 32, 4).append(nn.Softmax(dim=1)), classes()
    return made(model, (x, F.one_hot(y, 4).float()), nn.MSELoss(), adam(model, 2e-2))


@healthy()
def focal_loss() -> Built:
    model = mlp(10, 32, 4)

    def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()

    return made(model, classes(), focal, adam(model))


@healthy()
def dice_of_a_mask() -> Built:
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1), nn.Sigmoid())
    x = torch.randn(8, 1, 8, 8)

    def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1 - 2 * (output * target).sum() / (output.sum() + target.sum() + 1e-6)

    return made(model, (x, (x > 0).float()), dice, adam(model, 3e-2))


@healthy()
def huber_of_a_column() -> Built:
    model = mlp(6, 32, 1, activation=nn.Tanh)
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.HuberLoss(), adam(model))


@healthy()
def quantiles() -> Built:
    model = mlp(6, 64, 3, activation=nn.Tanh)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = target - output
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), pinball, adam(model, 3e-3))


@healthy()
def hinge_of_signs() -> Built:
    model, (x, y) = mlp(10, 32, 1), classes(2)
    return made(model, (x, y[:, None] * 2.0 - 1), lambda output, target: F.relu(1 - output * target).mean(), adam(model))


@healthy()
def sum_under_adam() -> Built:
    """Which does not care for the scale of a loss."""
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(reduction="sum"), adam(model))


@healthy()
def loss_divided_under_adam() -> Built:
    model = Recurrent()
    return made(model, words(), lambda output, target: F.cross_entropy(output, target) / 64, adam(model, 2e-2))


@healthy()
def cosine_to_a_target() -> Built:
    model = mlp(6, 32, 8)
    return made(model, (torch.randn(8, 6), torch.randn(8, 8)), lambda o, y: (1 - F.cosine_similarity(o, y)).mean(), adam(model))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
