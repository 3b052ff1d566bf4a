"""Steps that are too small or too large: learning rates, schedulers, weight decay, clipping, gradients that add up, scaled losses.

A callable does one step and returns the loss.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.models import Recurrent, Tagger, adam, bert, classes, cnn, gpt2, mlp, pictures, sentences, words

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


@planted("weight_decay")
def adamw_that_decays_all(right: bool) -> Built:
    model = mlp(10, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01 if right else 50.0)
    return made(model, classes(), nn.CrossEntropyLoss(), optimizer)


@planted("weight_decay")
def sgd_with_a_decay_of_one(right: bool) -> Built:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.0 if right else 1.0)
    return made(model, pictures(), nn.CrossEntropyLoss(), optimizer)


@planted("weight_decay")
def bert_under_adam_with_l2(right: bool) -> Built:
    model = bert()
    ids = torch.randint(0, 32, (8, 8))
    optimizer = adam(model, 1e-3, weight_decay=0.0 if right else 3.0)
    return made(model, {"input_ids": ids, "labels": torch.arange(8) % 4}, optimizer=optimizer)


@planted("weight_decay")
def regression_with_decay_in_one_group(right: bool) -> Built:
    model = mlp(6, 32, 1, activation=nn.Tanh)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.0 if right else 20.0}]
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), torch.optim.Adam(groups, lr=1e-2))


@planted("clipping", "learning_rate")
def gradients_clipped_to_1e_5(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0 if right else 1e-5)
        optimizer.step()
        return loss

    return made(step)


@planted("clipping", "learning_rate")
def values_clipped_below_the_epsilon_of_adam(right: bool) -> Built:
    model, (x, y) = Recurrent(), words()
    optimizer = adam(model)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0 if right else 1e-12)
        optimizer.step()
        return loss.item()

    return made(step)


@planted("zero_grad_missing", "learning_rate")
def momentum_on_gradients_that_add_up(right: bool) -> Built:
    model, (x, y) = mlp(10, 64, 64, 4), classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        if right:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("zero_grad_missing", "learning_rate")
def adam_on_gradients_that_add_up(right: bool) -> Built:
    model, x, y = mlp(6, 32, 32, 1, activation=nn.Tanh), torch.randn(8, 6), torch.randn(8, 1)
    optimizer = adam(model, 3e-2)

    def step() -> torch.Tensor:
        if right:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("zero_grad_missing")
def zero_grad_between_backward_and_step(right: bool) -> Built:
    model, (x, y) = cnn(), pictures()
    optimizer = adam(model)

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        if right:
            optimizer.zero_grad()
        loss.backward()
        if not right:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        return loss

    return made(step)


@planted("zero_grad_missing", "learning_rate")
def transformer_whose_gradients_add_up(right: bool) -> Built:
    model, batch = gpt2(), sentences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step() -> torch.Tensor:
        if right:
            optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
