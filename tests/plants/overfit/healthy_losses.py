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
    healthy("nll-of-log-softmax")("""
        model = mlp(10, 32, 4).append(nn.LogSoftmax(dim=1))
        batch, loss_function, optimizer = classes(), nn.NLLLoss(), adam(model)
    """),
    healthy("nll-of-a-log-in-the-loss")("""
        model = Recurrent(nn.GRU)
        batch = words()
        loss_function = lambda output, target: F.nll_loss(output.softmax(1).clamp_min(1e-9).log(), target)
        optimizer = adam(model)
    """),
    healthy("bce-of-a-sigmoid")("""
        model, (x, y) = mlp(10, 32, 1).append(nn.Sigmoid()), classes(2)
        batch, loss_function, optimizer = (x, y[:, None].float()), nn.BCELoss(), adam(model)
    """),
    healthy("multi-label")("""
        model = mlp(10, 32, 5)
        batch, loss_function = (torch.randn(8, 10), torch.randint(0, 2, (8, 5)).float()), nn.BCEWithLogitsLoss()
        optimizer = adam(model, 2e-2)
    """),
    healthy("weighted-classes")("""
        model = mlp(10, 32, 4)
        batch, loss_function = classes(), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0, 1.0]))
        optimizer = adam(model)
    """),
    healthy("mean-squared-error-of-probabilities")("""
        model, (x, y) = mlp(10, 32, 4).append(nn.Softmax(dim=1)), classes()
        batch, loss_function, optimizer = (x, F.one_hot(y, 4).float()), nn.MSELoss(), adam(model, 2e-2)
    """),
    healthy("focal-loss")("""
        model = mlp(10, 32, 4)
        def loss_function(output, target):
            losses = F.cross_entropy(output, target, reduction="none")
            return ((1 - (-losses).exp()) ** 2 * losses).mean()
        batch, optimizer = classes(), adam(model)
    """),
    healthy("dice-of-a-mask")("""
        model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1), nn.Sigmoid())
        x = torch.randn(8, 1, 8, 8)
        def loss_function(output, target):
            return 1 - 2 * (output * target).sum() / (output.sum() + target.sum() + 1e-6)
        batch, optimizer = (x, (x > 0).float()), adam(model, 3e-2)
    """),
    healthy("huber-of-a-column")("""
        model = mlp(6, 32, 1, activation=nn.Tanh)
        batch, loss_function, optimizer = (torch.randn(8, 6), torch.randn(8, 1)), nn.HuberLoss(), adam(model)
    """),
    healthy("quantiles")("""
        model = mlp(6, 64, 3, activation=nn.Tanh)
        levels = torch.tensor([0.1, 0.5, 0.9])
        def loss_function(output, target):
            error = target - output
            return torch.maximum(levels * error, (levels - 1) * error).mean()
        batch, optimizer = (torch.randn(8, 6), torch.randn(8, 1)), adam(model, 3e-3)
    """),
    healthy("hinge-of-signs")("""
        model, (x, y) = mlp(10, 32, 1), classes(2)
        batch = (x, y[:, None] * 2.0 - 1)
        loss_function = lambda output, target: F.relu(1 - output * target).mean()
        optimizer = adam(model)
    """),
    # Which does not care for the scale of a loss.
    healthy("sum-under-adam")("""
        model = mlp(10, 32, 4)
        batch, loss_function, optimizer = classes(), nn.CrossEntropyLoss(reduction="sum"), adam(model)
    """),
    healthy("loss-divided-under-adam")("""
        model = Recurrent()
        batch = words()
        loss_function = lambda output, target: F.cross_entropy(output, target) / 64
        optimizer = adam(model, 2e-2)
    """),
    healthy("cosine-to-a-target")("""
        model = mlp(6, 32, 8)
        batch = (torch.randn(8, 6), torch.randn(8, 8))
        loss_function = lambda o, y: (1 - F.cosine_similarity(o, y)).mean()
        optimizer = adam(model)
    """),
)
