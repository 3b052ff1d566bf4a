"""Targets of another shape than the outputs, and labels moved by one.

Broadcasting compares each sample with all others; labels that are out of range raise, or leave a loss without a floor.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, adam, classes, mlp, words

__all__ = ["CASES"]


def _regression(width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, width), torch.randn(8)


@planted("target_shape")
def column_of_outputs_against_a_row_of_targets(right: bool) -> Built:
    model, (x, y) = mlp(6, 32, 1, activation=nn.Tanh), _regression()
    return made(model, (x, y[:, None] if right else y), nn.MSELoss(), adam(model))


@planted("target_shape")
def outputs_squeezed_against_a_column_of_targets(right: bool) -> Built:
    model, (x, y) = mlp(6, 32, 1, activation=nn.Tanh), _regression()
    model.append(nn.Flatten(0))
    return made(model, (x, y if right else y[:, None]), nn.MSELoss(), adam(model))


@planted("target_shape")
def absolute_error_of_an_lstm(right: bool) -> Built:
    model, (x, _), y = Recurrent(outputs=1), words(), torch.randn(8)
    return made(model, (x, y[:, None] if right else y), nn.L1Loss(), adam(model))


@planted("target_shape")
def depth_maps_without_their_channel(right: bool) -> Built:
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1))
    x = torch.randn(8, 1, 6, 6)
    y = x[:, 0].roll(1, 1)
    return made(model, (x, y[:, None] if right else y), nn.SmoothL1Loss(), adam(model))


class _TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 16), nn.Linear(3, 16), nn.Linear(16, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.left(a) + self.right(b)))


@planted("target_shape")
def two_inputs_and_an_error_written_by_hand(right: bool) -> Built:
    model, y = _TwoInputs(), torch.randn(8)
    batch = torch.randn(8, 4), torch.randn(8, 3), y[:, None] if right else y
    return made(model, batch, lambda output, target: (output - target).pow(2).mean(), adam(model))


class _EachStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


@planted("target_shape")
def forecast_of_eight_samples_of_eight_steps(right: bool) -> Built:
    """Equal numbers of both are what lets 8 x 8 x 1 and 8 x 8 be broadcast."""
    model, y = _EachStep(), torch.randn(8, 8)
    return made(model, (torch.randn(8, 8, 5), y[..., None] if right else y), nn.MSELoss(), adam(model, 2e-2))


@planted("target_shape")
def step_of_a_value_network(right: bool) -> Built:
    model, (x, returns) = mlp(6, 32, 1, activation=nn.Tanh), _regression()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        values = model(x).squeeze(-1) if right else model(x)
        loss = F.mse_loss(values, returns)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("off_by_one_labels")
def binary_labels_of_one_and_two(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 1), classes(2)
    return made(model, (x, (y + (0 if right else 1))[:, None].float()), nn.BCEWithLogitsLoss(), adam(model))


class _Columns(nn.Module):
    """Log-probabilities of each column of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


@planted("off_by_one_labels")
def letters_that_begin_at_the_blank_of_ctc(right: bool) -> Built:
    model = _Columns()
    letters = torch.randint(0, 3, (8, 2))
    letters[:, 1] = (letters[:, 0] + 1) % 4
    lengths = torch.full((8,), 6), torch.full((8,), 2)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(output, target, *lengths)

    return made(model, (torch.randn(8, 6, 8), letters + (1 if right else 0)), loss_function, adam(model, 2e-2))


@planted("off_by_one_labels", raises=True)
def classes_from_one_to_four(right: bool) -> Built:
    model, (x, y) = mlp(10, 32, 4), classes()
    return made(model, (x, y if right else y + 1), nn.CrossEntropyLoss(), adam(model))


@planted("off_by_one_labels", raises=True)
def mask_from_one_to_three(right: bool) -> Built:
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
    x = torch.randn(8, 1, 6, 6)
    y = (x[:, 0] > 0.4).long() + (x[:, 0] > -0.4).long()
    return made(model, (x, y if right else y + 1), nn.CrossEntropyLoss(), adam(model, 3e-2))


@planted("off_by_one_labels")
def next_words_shifted_twice(right: bool) -> Built:
    model = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 12))
    keys, values = torch.randint(0, 6, (8, 8)), torch.randperm(6) + 6
    ids = torch.stack((keys, values[keys]), -1).flatten(1)
    shift = 1 if right else 2
    targets = ids.roll(-shift, 1)
    targets[:, 1::2] = -100
    return made(model, (ids, targets), lambda o, y: F.cross_entropy(o.transpose(1, 2), y), adam(model, 5e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
