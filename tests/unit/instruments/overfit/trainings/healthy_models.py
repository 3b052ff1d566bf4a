"""Healthy trainings of many kinds of models, whose least loss is zero.

Some of them look like a fault: frozen bodies, tied weights, unused labels, log-softmax before a cross entropy.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.nn.utils import parametrizations, prune

from tests.unit.instruments.overfit.case import Built, Case, healthy, made
from tests.unit.instruments.overfit.trainings.models import Recurrent, Tagger, adam, classes, cnn, mlp, pictures, words

__all__ = ["CASES"]


@healthy()
def mlp_classifies() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def cnn_with_batch_norm_and_dropout() -> Built:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(288, 4))
    return made(model, pictures(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def half_of_all_units_dropped() -> Built:
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def lstm_over_words() -> Built:
    model = Recurrent(nn.LSTM)
    return made(model, words(), nn.CrossEntropyLoss(), adam(model, 2e-2))


class _Stateful(nn.Module):
    """Takes the states of the batch before, and keeps its own, detached as truncated backpropagation asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 24, batch_first=True), nn.Linear(24, 1)
        self.states: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, states = self.rnn(x, self.states)
        self.states = (states[0].detach(), states[1].detach())
        return self.head(output[:, -1])


@healthy()
def lstm_that_keeps_its_states() -> Built:
    model = _Stateful()
    return made(model, (torch.randn(8, 5, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model))


@healthy()
def tags_with_padding() -> Built:
    model = Tagger()
    ids = torch.randint(0, 20, (8, 6))
    return made(model, (ids, (ids % 5).masked_fill(torch.arange(6) > 3, -100)), nn.CrossEntropyLoss(ignore_index=-100), adam(model))


@healthy()
def frozen_body_on_purpose() -> Built:
    model = mlp(10, 64, 4)
    model[0].requires_grad_(False)
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.Adam(model[2].parameters(), lr=3e-2))


class _Adapted(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@healthy()
def adapters_of_low_rank() -> Built:
    model = nn.Sequential(_Adapted(nn.Linear(10, 32)), nn.ReLU(), _Adapted(nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return made(model, classes(), nn.CrossEntropyLoss(), optimizer)


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.second(adjacency @ torch.relu(self.first(adjacency @ x)))


@healthy()
def graph_of_eight_nodes() -> Built:
    model, adjacency = _Graph(), torch.eye(8) + torch.eye(8).roll(1, 0)
    return made(model, (torch.randn(8, 6), adjacency / 2, torch.arange(8) % 3), nn.CrossEntropyLoss(), adam(model, 2e-2))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = mlp(10, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.relu(self.body(x))
        return self.kind(features), self.size(features)


@healthy()
def two_heads_of_one_body() -> Built:
    model, (x, y) = _TwoHeads(), classes()

    def loss_function(outputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.cross_entropy(outputs[0], targets[0]) + 0.5 * F.mse_loss(outputs[1], targets[1])

    return made(model, (x, (y, torch.randn(8, 1))), loss_function, adam(model))


@healthy()
def equal_rows_with_equal_labels() -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    x[4:] = x[:4].clone()
    return made(model, (x, y), nn.CrossEntropyLoss(), adam(model))


@healthy()
def all_rows_equal_and_of_one_class() -> Built:
    model, (x, _) = mlp(10, 32, 4), classes()
    return made(model, (x[:1].repeat(8, 1), torch.full((8,), 2)), nn.CrossEntropyLoss(), adam(model))


@healthy()
def log_softmax_before_cross_entropy() -> Built:
    """Which changes nothing: a second log-softmax is the identity."""
    model = mlp(10, 32, 4).append(nn.LogSoftmax(dim=1))
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def labels_from_one_for_one_class_more() -> Built:
    model, (x, y) = mlp(10, 32, 5), classes()
    return made(model, (x, y + 1), nn.CrossEntropyLoss(), adam(model))


@healthy()
def pruned_after_the_optimizer() -> Built:
    """Which keeps the parameters: they have a new name."""
    model = mlp(10, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for layer in model[::2]:
        prune.l1_unstructured(layer, "weight", 0.2)
    return made(model, classes(), nn.CrossEntropyLoss(), optimizer)


@healthy()
def weight_norm_and_a_buffer() -> Built:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 32)), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 1))
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model))


@healthy()
def zero_head_as_of_a_diffusion_model() -> Built:
    model = mlp(10, 32, 4)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def compiled_model() -> Built:
    model = torch.compile(mlp(10, 32, 4), backend="eager")
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def pictures_of_0_to_255_under_batch_norm() -> Built:
    model = nn.Sequential(nn.BatchNorm2d(1), *cnn())
    x, y = pictures()
    return made(model, ((x * 64 + 128).clamp(0, 255), y), nn.CrossEntropyLoss(), adam(model))


@healthy()
def batch_of_thirty_two() -> Built:
    model = mlp(10, 64, 4)
    return made(model, classes(samples=32), nn.CrossEntropyLoss(), adam(model))


@healthy()
def one_sample() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(samples=1), nn.CrossEntropyLoss(), adam(model))


@healthy()
def half_of_the_units_dead() -> Built:
    model = mlp(10, 64, 4)
    nn.init.constant_(model[0].bias[:32], -50)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def in_double_precision_and_evaluation() -> Built:
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)).double().eval()
    x, y = classes()
    return made(model, (x.double(), y), nn.CrossEntropyLoss(), adam(model))


class _Prototypes(nn.Module):
    """A straight-through estimator: the codes are detached on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.head = nn.Linear(10, 16), nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        nearest = self.codes[torch.cdist(z, self.codes).argmin(1)]
        return self.head(z + (nearest - z).detach() + 0.1 * z)


@healthy()
def straight_through_a_code_book() -> Built:
    model = _Prototypes()
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 3e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
