"""A loss that asks for something else than the model gives: probabilities for logits, another shape, labels moved by one.

Two slugs stand where the issue's words fit both: softmax in the loss function is a double softmax and a wrong input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.models import Recurrent, Tagger, adam, bert, classes, cnn, mlp, pictures, words

__all__ = ["CASES"]


def _ends_in(model: nn.Module, last: nn.Module, right: bool) -> nn.Module:
    return model if right else nn.Sequential(model, last)


@planted("double_softmax")
def mlp_that_ends_in_softmax(right: bool) -> Built:
    model = _ends_in(mlp(10, 32, 4), nn.Softmax(dim=1), right)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("double_softmax")
def binary_cnn_that_ends_in_softmax(right: bool) -> Built:
    model = _ends_in(cnn(2), nn.Softmax(dim=-1), right)
    return made(model, pictures(2), nn.CrossEntropyLoss(), adam(model))


@planted("double_softmax")
def ten_classes_after_softmax_in_an_lstm(right: bool) -> Built:
    model = _ends_in(Recurrent(outputs=10), nn.Softmax(dim=1), right)
    return made(model, words(8), nn.CrossEntropyLoss(), adam(model, 2e-2))


@planted("double_softmax")
def segmentation_after_softmax_over_channels(right: bool) -> Built:
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 1))
    model = _ends_in(body, nn.Softmax2d(), right)
    x = torch.randn(8, 1, 8, 8)
    y = (x[:, 0] > 0.4).long() + (x[:, 0] > -0.4).long()
    return made(model, (x, y), nn.CrossEntropyLoss(), adam(model, 3e-2))


@planted("double_softmax", "wrong_loss_input")
def tags_with_padding_after_softmax_in_the_loss(right: bool) -> Built:
    model = Tagger()
    ids = torch.randint(0, 20, (8, 6))
    tags = (ids % 5).masked_fill(torch.arange(6) > 3, -100)

    def loss_function(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        probabilities = output if right else output.softmax(1)
        return F.cross_entropy(probabilities, target, ignore_index=-100)

    return made(model, (ids, tags), loss_function, adam(model))


@planted("double_softmax", "wrong_loss_input")
def step_with_softmax_before_cross_entropy(right: bool) -> Built:
    model = bert()
    optimizer, ids, y = adam(model, 1e-3), torch.randint(0, 32, (8, 8)), torch.arange(8) % 4

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits if right else torch.softmax(logits, -1), y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


@planted("wrong_loss_input")
def sigmoid_before_cross_entropy(right: bool) -> Built:
    model = _ends_in(mlp(10, 32, 4), nn.Sigmoid(), right)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("wrong_loss_input")
def sigmoid_before_bce_with_logits(right: bool) -> Built:
    model = _ends_in(mlp(10, 32, 1), nn.Sigmoid(), right)
    x, y = classes(2)
    return made(model, (x, y[:, None].float()), nn.BCEWithLogitsLoss(), adam(model))


@planted("wrong_loss_input")
def multi_label_with_sigmoid_twice(right: bool) -> Built:
    model = _ends_in(Recurrent(outputs=6), nn.Sigmoid(), right)
    return made(model, (words()[0], torch.randint(0, 2, (8, 6)).float()), nn.BCEWithLogitsLoss(), adam(model, 2e-2))


@planted("wrong_loss_input")
def mask_with_sigmoid_twice(right: bool) -> Built:
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    model = _ends_in(body, nn.Sigmoid(), right)
    x = torch.randn(8, 1, 8, 8)
    return made(model, (x, (x > 0).float()), nn.BCEWithLogitsLoss(), adam(model, 3e-2))


@planted("wrong_loss_input")
def raw_logits_into_nll_loss(right: bool) -> Built:
    model = mlp(10, 32, 4)
    if right:
        model.append(nn.LogSoftmax(dim=1))
    return made(model, classes(), nn.NLLLoss(), adam(model))


@planted("wrong_loss_input")
def probabilities_into_nll_loss(right: bool) -> Built:
    model = cnn()
    model.append(nn.LogSoftmax(dim=1) if right else nn.Softmax(dim=1))
    return made(model, pictures(), nn.NLLLoss(), adam(model))


@planted("wrong_loss_input", raises=True)
def raw_logits_into_bce_loss(right: bool) -> Built:
    model = mlp(10, 32, 1)
    if right:
        model.append(nn.Sigmoid())
    x, y = classes(2)
    return made(model, (x, y[:, None].float()), nn.BCELoss(), adam(model))


@planted("wrong_loss_input")
def probabilities_into_kl_div(right: bool) -> Built:
    model = mlp(10, 32, 4)
    model.append(nn.LogSoftmax(dim=1) if right else nn.Softmax(dim=1))
    x, y = classes()
    return made(model, (x, F.one_hot(y, 4).float()), nn.KLDivLoss(reduction="batchmean"), adam(model))


@planted("wrong_loss_input")
def softmax_over_the_batch_before_a_log(right: bool) -> Built:
    model = mlp(10, 32, 4)
    model.append(nn.LogSoftmax(dim=1 if right else 0))
    return made(model, classes(), nn.NLLLoss(), adam(model))


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
