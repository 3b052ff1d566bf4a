"""Weights from which nothing can be learnt: dead units and initial values.

A dead layer is also badly initialized, and either word is right for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, classes, cnn, gpt2, mlp, pictures, sentences, words

__all__ = ["CASES"]


@planted("dead_units", "bad_init", parameters=("0.weight", "0.bias"))
def relu_below_a_bias_of_minus_fifty(right: bool) -> Built:
    model = mlp(10, 32, 4)
    if not right:
        nn.init.constant_(model[0].bias, -50)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("dead_units", "bad_init", parameters=("3.weight", "3.bias"))
def second_convolution_dead(right: bool) -> Built:
    model = cnn()
    if not right:
        nn.init.constant_(model[3].bias, -30)
    return made(model, pictures(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@planted("dead_units", "bad_init")
def killed_by_steps_of_an_earlier_cell(right: bool) -> Built:
    model, (x, y) = mlp(6, 32, 16, 1), (torch.randn(8, 6), torch.randn(8, 1) * 3 + 3)
    if not right:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return made(model, (x, y), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


@planted("dead_units", "bad_init")
def output_below_its_own_relu(right: bool) -> Built:
    model = mlp(6, 32, 1).append(nn.ReLU())
    nn.init.constant_(model[2].bias, 1.0 if right else -20.0)
    return made(model, (torch.randn(8, 6), torch.rand(8, 1) + 0.5), nn.MSELoss(), adam(model))


@planted("dead_units", "bad_init", parameters=("0.weight", "0.bias"))
def hard_sigmoid_saturated(right: bool) -> Built:
    model = mlp(10, 32, 4, activation=nn.Hardsigmoid)
    if not right:
        nn.init.constant_(model[0].bias, 40)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 3e-2))


@planted("bad_init", "dead_units")
def all_weights_zero(right: bool) -> Built:
    model = mlp(10, 32, 32, 4)
    if not right:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("bad_init")
def all_weights_equal(right: bool) -> Built:
    model = mlp(10, 32, 32, 4, activation=nn.Tanh)
    if not right:
        for layer in model[::2]:
            nn.init.constant_(layer.weight, 0.5)
            nn.init.zeros_(layer.bias)
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.3))


@planted("bad_init")
def tanh_saturated_by_weights_of_a_hundred(right: bool) -> Built:
    model = mlp(2, 16, 16, 1, activation=nn.Tanh)
    if not right:
        for layer in model[:4:2]:
            nn.init.normal_(layer.weight, std=100)
            nn.init.constant_(layer.bias, 300)
    return made(model, (torch.randn(8, 2) * 0.1, torch.randn(8, 1)), nn.MSELoss(), adam(model, 2e-2))


@planted("bad_init")
def gpt2_with_an_initializer_range_of_zero(right: bool) -> Built:
    model = gpt2(initializer_range=0.02 if right else 0.0)
    return made(model, sentences(), optimizer=torch.optim.SGD(model.parameters(), lr=0.3))


@planted("bad_init")
def deep_net_of_tiny_weights(right: bool) -> Built:
    model = mlp(10, 32, 32, 32, 32, 4)
    for layer in model[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if not right:
            nn.init.normal_(layer.weight, std=1e-4)
        nn.init.zeros_(layer.bias)
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))


class _Adapted(nn.Module):
    def __init__(self, layer: nn.Linear, zero: bool):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(8, layer.in_features) if zero else torch.randn(8, layer.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


@planted("bad_init", "frozen")
def adapters_of_which_both_factors_are_zero(right: bool) -> Built:
    model = nn.Sequential(_Adapted(nn.Linear(10, 32), not right), nn.ReLU(), _Adapted(nn.Linear(32, 4), not right))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return made(model, classes(), nn.CrossEntropyLoss(), optimizer)


@planted("bad_init")
def embedding_and_head_of_zero(right: bool) -> Built:
    model = Recurrent(nn.RNN)
    model.rnn.bias_ih_l0.requires_grad_(False)
    if not right:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return made(model, words(), nn.CrossEntropyLoss(), adam(model))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
