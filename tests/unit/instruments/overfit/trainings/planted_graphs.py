"""Losses that lead to no weight, or not to all: detached, rounded, made anew of numbers.

The line to blame is in the file itself.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import adam, classes, mlp, words

__all__ = ["CASES"]


class _Detaches(nn.Module):
    """Features of two numbers, so that the head alone is not enough."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.body = mlp(10, 32, 2)
        self.head = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(x)
        if self.how == "detach":
            features = features.detach()
        elif self.how == "numpy":
            features = torch.from_numpy(features.data.numpy())
        elif self.how == "no_grad":
            with torch.no_grad():
                features = self.body(x).clone()
        elif self.how == "tensor":
            features = torch.tensor(features.tolist())
        elif self.how == "round":
            features = torch.round(features)
        return self.head(features)


def _cut(how: str, right: bool) -> Built:
    model = _Detaches("" if right else how)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 2e-2))


@planted("cut_graph", location_text="features = features.detach()")
def features_detached(right: bool) -> Built:
    return _cut("detach", right)


@planted("cut_graph", location_text="torch.from_numpy(features.data.numpy())")
def features_through_numpy(right: bool) -> Built:
    return _cut("numpy", right)


@planted("cut_graph", location_text="features = self.body(x).clone()")
def features_under_no_grad(right: bool) -> Built:
    return _cut("no_grad", right)


@planted("cut_graph", location_text="features = torch.tensor(features.tolist())")
def features_made_anew_of_their_numbers(right: bool) -> Built:
    return _cut("tensor", right)


@planted("cut_graph", location_text="features = torch.round(features)")
def features_rounded(right: bool) -> Built:
    return _cut("round", right)


@planted("cut_graph", location_text="codes = codes.detach()")
def codes_detached_in_a_step(right: bool) -> Built:
    encoder, decoder, x = nn.Linear(10, 3), nn.Linear(3, 6), torch.randn(8, 10)
    y = (x @ torch.randn(10, 3)) @ torch.randn(3, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        codes = encoder(x)
        if not right:
            codes = codes.detach()
        loss = F.mse_loss(decoder(codes), y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("cut_graph", location_text="torch.tensor(loss.item(), requires_grad=True)")
def loss_wrapped_anew(right: bool) -> Built:
    model = mlp(10, 32, 4)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        return loss if right else torch.tensor(loss.item(), requires_grad=True)

    return made(model, classes(), loss_function, adam(model))


@planted("cut_graph", location_text="output.argmax(1).float().requires_grad_()")
def accuracy_as_the_loss(right: bool) -> Built:
    model = mlp(10, 32, 4)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if right:
            return F.cross_entropy(output, target)
        predicted = output.argmax(1).float().requires_grad_()
        return (predicted != target).float().mean() + 0 * predicted.sum()

    return made(model, classes(), loss_function, adam(model))


class _Encoded(nn.Module):
    """One number from the last state of a narrow encoder."""

    def __init__(self, cut: bool):
        super().__init__()
        self.cut = cut
        self.embedding, self.encoder = nn.Embedding(20, 16), nn.GRU(16, 2, batch_first=True)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.encoder(self.embedding(ids))
        if self.cut:
            states = states.data
        return self.head(states[:, -1])


@planted("cut_graph", location_text="states = states.data")
def encoder_cut_off_by_data(right: bool) -> Built:
    model = _Encoded(not right)
    return made(model, (words()[0], torch.randn(8, 1)), nn.MSELoss(), adam(model, 3e-2))


@planted("cut_graph", raises=True, location_text="return self.inner(x).argmax(-1).float()")
def model_returns_its_argmax(right: bool) -> Built:
    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(10, 32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if right:
                return self.inner(x)
            return self.inner(x).argmax(-1).float()

    model = Predicts()
    loss = nn.CrossEntropyLoss() if right else lambda output, target: F.mse_loss(output, target.float())
    return made(model, classes(), loss, adam(model))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
