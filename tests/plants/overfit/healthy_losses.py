"""Healthy trainings under many losses, of which some cannot be zero.

Their floors are known exactly, or found by a long plain training.
"""

from __future__ import annotations

import math

from tests.plants.overfit.training import healthy

_SMOOTH = (0.925, 0.025, 0.025, 0.025)


def _entropy(*probabilities: float) -> float:
    return -sum(p * math.log(p) for p in probabilities)


PLANTS = (
    healthy("label-smoothing", floor=_entropy(*_SMOOTH))("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(label_smoothing=0.1), adam(model)
    """),
    healthy("soft-targets-in-cross-entropy", floor=_entropy(0.7, 0.1, 0.1, 0.1))("""
        model, (x, y) = mlp(10, 32, 4), classes()
        batch, loss_function, optimizer = (x, F.one_hot(y, 4) * 0.6 + 0.1), nn.CrossEntropyLoss(), adam(model)
    """),
    healthy("focal-loss")("""
        model = mlp(10, 32, 4)
        def loss_function(output, target):
            losses = F.cross_entropy(output, target, reduction="none")
            return ((1 - (-losses).exp()) ** 2 * losses).mean()
        batch, optimizer = classes(), adam(model)
    """),
    # Which does not care for the scale of a loss.
    healthy("sum-under-adam")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(reduction="sum"), adam(model)
    """),
)
