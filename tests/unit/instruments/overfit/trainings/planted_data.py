"""Batches that no model could learn, and models that could learn no batch: conflicts, scales, norms of one value, lost inputs, capacity."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, bert, classes, cnn, mlp, pictures, words

__all__ = ["CASES"]


@planted("conflicting_labels", rows=(0, 1, 2, 3, 4, 5))
def three_rows_twice_with_other_labels(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    twice = x.clone()
    twice[1], twice[3], twice[5] = x[0], x[2], x[4]
    return made(model, (x if right else twice, y), nn.CrossEntropyLoss(), adam(model))


@planted("conflicting_labels", rows=(0, 1, 2, 3, 4, 5, 6, 7))
def one_picture_eight_times(right: bool) -> Built:
    model, (x, y) = cnn(), pictures()
    return made(model, (x if right else x[:1].repeat(8, 1, 1, 1), y), nn.CrossEntropyLoss(), adam(model))


@planted("conflicting_labels", rows=(0, 1, 2, 3, 4, 5, 6, 7))
def one_sample_eight_times_under_dropout(right: bool) -> Built:
    """A mask that is drawn once and held would tell the equal rows apart."""
    model, (x, y) = mlp(10, 64, 4), classes()
    model.insert(2, nn.Dropout(0.2))
    return made(model, (x if right else x[:1].repeat(8, 1), y), nn.CrossEntropyLoss(), adam(model, 3e-2))


@planted("conflicting_labels", rows=(0, 2, 4, 6, 1, 7))
def sentences_equal_after_they_are_cut(right: bool) -> Built:
    model = bert()
    ids = torch.randint(0, 32, (8, 8))
    if not right:
        ids[[2, 4, 6]], ids[7] = ids[0].clone(), ids[1].clone()
    return made(model, {"input_ids": ids, "labels": torch.tensor([0, 1, 2, 3, 1, 0, 3, 2])}, optimizer=adam(model, 1e-3))


@planted("conflicting_labels", rows=(0, 4, 1, 5, 2, 6))
def targets_of_a_regression_differ_for_equal_inputs(right: bool) -> Built:
    model, x, y = mlp(6, 32, 1, activation=nn.Tanh), torch.randn(8, 6), torch.randn(8, 1)
    if not right:
        x[4:7] = x[:3].clone()
    return made(model, (x, y), nn.MSELoss(), adam(model))


@planted("conflicting_labels", rows=(0, 3, 6, 1, 4, 7))
def multi_label_rows_repeated_in_a_step(right: bool) -> Built:
    model, (x, _) = Recurrent(nn.GRU, outputs=6), words()
    if not right:
        x[[3, 6]], x[[4, 7]] = x[0].clone(), x[1].clone()
    y = torch.randint(0, 2, (8, 6)).float()
    optimizer = adam(model, 2e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("input_scale")
def features_with_a_mean_of_100_000(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    return made(model, (x if right else x + 1e5, y), nn.CrossEntropyLoss(), adam(model))


@planted("input_scale")
def regression_on_inputs_of_a_million(right: bool) -> Built:
    model, x, y = mlp(6, 32, 1), torch.randn(8, 6), torch.randn(8, 1)
    return made(model, (x if right else x * 1e6, y), nn.MSELoss(), adam(model))


@planted("input_scale")
def pictures_of_a_hundred_thousandth(right: bool) -> Built:
    model, (x, y) = cnn(), pictures()
    return made(model, (x if right else x * 1e-5, y), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2))


@planted("input_scale")
def saturated_by_inputs_of_ten_thousand(right: bool) -> Built:
    model = nn.Sequential(nn.Linear(2, 64), nn.Sigmoid(), nn.Linear(64, 4))
    x, y = classes(4, 2)
    return made(model, (x if right else x * 50 + 1e4, y), nn.CrossEntropyLoss(), adam(model, 5e-2))


@planted("capacity")
def exclusive_or_with_a_linear_model(right: bool) -> Built:
    x = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]).repeat(2, 1) + 0.01 * torch.randn(8, 2)
    y = (x.round()[:, 0] != x.round()[:, 1]).long()
    model = mlp(2, 32, 2) if right else nn.Linear(2, 2)
    return made(model, (x, y), nn.CrossEntropyLoss(), adam(model, 5e-2))


@planted("capacity")
def layers_without_an_activation(right: bool) -> Built:
    x = torch.linspace(-2, 2, 8)[:, None]
    model = mlp(1, 32, 32, 1, activation=nn.Tanh if right else nn.Identity)
    return made(model, (x, (3 * x).sin()), nn.MSELoss(), adam(model, 2e-2))


@planted("capacity")
def bigrams_for_what_needs_context(right: bool) -> Built:
    ids = torch.randint(0, 3, (8, 6))
    ids[:, 0] = torch.arange(8) + 3
    model = nn.Embedding(12, 12)
    if right:
        model = _Reads()
    return made(model, (ids[:, :-1], ids[:, 1:]), lambda o, y: F.cross_entropy(o.transpose(1, 2), y), adam(model, 3e-2))


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(12, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


@planted("capacity")
def autoencoder_through_one_number(right: bool) -> Built:
    x = torch.randn(8, 10)
    width = 12 if right else 1
    model = nn.Sequential(nn.Linear(10, width), nn.Linear(width, 10))
    return made(model, (x, x), nn.MSELoss(), adam(model, 3e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
