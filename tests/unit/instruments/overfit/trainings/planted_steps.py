"""Steps that are too small or too large: learning rates, schedulers, weight decay, clipping, gradients that add up, scaled losses.

A callable does one step and returns the loss.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, bert, classes, cnn, gpt2, mlp, pictures, sentences, words

__all__ = ["CASES"]


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


@planted("clipping")
def clipped_to_nothing(right: bool) -> Built:
    """A maximum of zero, as it is written where no clipping is meant."""
    model, (x, y) = cnn(), pictures()
    optimizer = adam(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not right:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.0)
        optimizer.step()
        return loss

    return made(step)


@planted("clipping", "learning_rate")
def gradients_clamped_by_hooks(right: bool) -> Built:
    model = mlp(6, 32, 1, activation=nn.Tanh)
    if not right:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1e-6, 1e-6))
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))


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
