"""A loss that asks for something else than the model gives: probabilities for logits, another shape, labels moved by one.

Two slugs stand where the issue's words fit both: softmax in the loss function is a double softmax and a wrong input.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import Recurrent, Tagger, adam, bert, classes, cnn, mlp, pictures, words

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


@planted("wrong_loss_input")
def logits_through_a_tanh(right: bool) -> Built:
    model = _ends_in(Recurrent(nn.GRU), nn.Tanh(), right)
    return made(model, words(), nn.CrossEntropyLoss(), adam(model, 2e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
