"""Healthy trainings under many optimizers, and whole steps: schedulers, clipping, scalers, closures, accumulated gradients.

A callable does one step and returns the loss.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, healthy, made
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, classes, cnn, gpt2, mlp, pictures, sentences, words

__all__ = ["CASES"]


@healthy()
def plain_gradient_descent() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.3))


@healthy()
def momentum_and_a_little_decay() -> Built:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return made(model, pictures(), nn.CrossEntropyLoss(), optimizer)


@healthy()
def adamw_with_its_decay() -> Built:
    model = mlp(6, 32, 1)
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=1e-2))


@healthy()
def rmsprop() -> Built:
    model = Recurrent(nn.GRU)
    return made(model, words(), nn.CrossEntropyLoss(), torch.optim.RMSprop(model.parameters(), lr=3e-3))


@healthy()
def adagrad() -> Built:
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.Adagrad(model.parameters(), lr=5e-2))


@healthy()
def two_groups_of_rates() -> Built:
    model = mlp(10, 32, 4)
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "weight_decay": 0.0}]
    return made(model, classes(), nn.CrossEntropyLoss(), torch.optim.AdamW(groups, lr=3e-2))


@healthy()
def lbfgs_on_the_model() -> Built:
    model = mlp(6, 16, 1, activation=nn.Tanh)
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))


@healthy()
def lbfgs_in_a_step() -> Built:
    model, x, y = mlp(6, 16, 1, activation=nn.Tanh), torch.randn(8, 6), torch.randn(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return made(lambda: optimizer.step(closure))


@healthy()
def one_cycle_in_a_step() -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=250)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return made(step)


@healthy()
def gradients_clipped_to_one() -> Built:
    model, batch = gpt2(), sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)

    def step() -> float:
        model.train()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return made(step)


@healthy()
def scaler_and_autocast_in_a_step() -> Built:
    model, (x, y) = mlp(10, 64, 4), classes()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return made(step)


class _Autocast(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


@healthy()
def autocast_in_the_forward() -> Built:
    model = _Autocast(mlp(10, 64, 4))
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@healthy()
def gradients_of_two_halves_added_on_purpose() -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    optimizer = adam(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in (slice(0, 4), slice(4, 8)):
            loss = F.cross_entropy(model(x[half]), y[half]) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return made(step)


@healthy()
def two_optimizers_in_a_step() -> Built:
    body, head, (x, y) = mlp(10, 32, 16), nn.Linear(16, 4), classes()
    optimizers = (torch.optim.SGD(body.parameters(), lr=0.05), adam(head, 2e-2))

    def step() -> torch.Tensor:
        loss = F.cross_entropy(head(F.relu(body(x))), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return made(step)


@healthy()
def logged_with_its_features_detached() -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    optimizer, history = adam(model), []

    def step() -> float:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        history.append(output.detach().argmax(1).eq(y).float().mean().item())
        loss.backward()
        optimizer.step()
        return loss.item()

    return made(step)


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
