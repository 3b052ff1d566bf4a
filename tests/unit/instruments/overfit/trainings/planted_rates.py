"""Learning rates, schedulers and losses of a wrong scale.

Under plain gradient descent the two are one: a scaled loss is a scaled rate.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, Tagger, adam, classes, cnn, gpt2, mlp, pictures, sentences, words

__all__ = ["CASES"]


@planted("learning_rate", factor=(1e3, 1e6))
def adam_at_1e_6(right: bool) -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 1e-2 if right else 1e-6))


@planted("learning_rate", factor=(100, 1e4))
def cnn_under_sgd_at_1e_4(right: bool) -> Built:
    model = cnn()
    return made(model, pictures(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2 if right else 1e-4))


@planted("learning_rate", factor=(1e3, 1e5))
def gpt2_under_adamw_at_1e_7(right: bool) -> Built:
    model = gpt2()
    return made(model, sentences(), optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3 if right else 1e-7))


@planted("learning_rate")
def learning_rate_of_zero(right: bool) -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 1e-2 if right else 0.0))


@planted("learning_rate")
def rate_decays_in_every_step(right: bool) -> Built:
    model, (x, y) = Recurrent(nn.GRU), words()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0 if right else 0.5)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return made(step)


@planted("learning_rate")
def warm_up_that_takes_a_million_steps(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / (1 if right else 1e6)))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return made(step)


@planted("learning_rate", factor=(1e-5, 1e-1))
def deep_tanh_net_under_adam_at_1(right: bool) -> Built:
    model = mlp(6, 32, 32, 32, 1, activation=nn.Tanh)
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model, 1e-2 if right else 1.0))


@planted("learning_rate", factor=(1e-4, 0.1))
def regression_under_sgd_at_10(right: bool) -> Built:
    model = mlp(6, 64, 1, activation=nn.Tanh)
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1 if right else 10.0))


@planted("learning_rate", factor=(1e-4, 1e-1))
def deep_cnn_under_momentum_at_3(right: bool) -> Built:
    model = cnn(channels=16)
    return made(model, pictures(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.03 if right else 3.0, momentum=0.9))


@planted("learning_rate", factor=(100, 1e6))
def adagrad_at_1e_5(right: bool) -> Built:
    model = Recurrent()
    return made(model, words(), nn.CrossEntropyLoss(), torch.optim.Adagrad(model.parameters(), lr=5e-2 if right else 1e-5))


@planted("reduction", "learning_rate", factor=(512, 512))
def segmentation_summed_over_pixels(right: bool) -> Built:
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))
    x = torch.randn(8, 1, 8, 8)
    loss = nn.CrossEntropyLoss(reduction="mean" if right else "sum")
    return made(model, (x, (x[:, 0] > 0).long()), loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@planted("reduction", "learning_rate", factor=(1e-4, 1e-4))
def loss_divided_by_ten_thousand(right: bool) -> Built:
    model = mlp(10, 32, 4)
    scale = 1.0 if right else 1e-4
    return made(model, classes(), lambda o, y: scale * F.cross_entropy(o, y), torch.optim.SGD(model.parameters(), lr=0.3))


@planted("reduction", factor=(1e-4, 1e-4))
def loss_divided_under_weight_decay(right: bool) -> Built:
    model = mlp(10, 32, 4)
    scale = 1.0 if right else 1e-4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-3)
    return made(model, classes(), lambda o, y: scale * F.cross_entropy(o, y), optimizer)


@planted("reduction", "learning_rate")
def loss_below_the_epsilon_of_adam(right: bool) -> Built:
    model = mlp(10, 32, 4)
    scale = 1.0 if right else 1e-13
    return made(model, classes(), lambda o, y: scale * F.cross_entropy(o, y), adam(model))


@planted("reduction", "learning_rate")
def mean_over_words_of_which_most_are_masked(right: bool) -> Built:
    model = Tagger()
    ids = torch.randint(0, 20, (8, 30))
    tags = torch.full_like(ids, -100)
    tags[:, 0] = torch.arange(8) % 5

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(output, target, reduction="none")
        return losses.sum() / 8 if right else losses.mean()

    return made(model, (ids, tags), loss_function, torch.optim.SGD(model.parameters(), lr=0.5))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
