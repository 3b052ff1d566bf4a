"""Weights that no step can move: frozen, unknown to the optimizer, or cut off from the loss."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.nn.utils import parametrizations

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import (
    Recurrent,
    Tagger,
    adam,
    bert,
    classes,
    cnn,
    gpt2,
    mlp,
    pictures,
    sentences,
    words,
)

__all__ = ["CASES"]


@planted("frozen", parameters=("0.weight", "0.bias", "3.weight", "3.bias", "6.weight"))
def cnn_of_which_one_bias_trains(right: bool) -> Built:
    model = cnn()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = right or name == "6.bias"
    return made(model, pictures(), nn.CrossEntropyLoss(), adam(model))


@planted("frozen", parameters=("0.weight", "0.bias", "2.weight", "2.bias"))
def mlp_with_a_narrow_head_on_a_frozen_body(right: bool) -> Built:
    model = mlp(10, 32, 2, 4)
    model[:3].requires_grad_(right)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("frozen", parameters=("embedding.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0"))
def gru_frozen_before_the_optimizer_filters(right: bool) -> Built:
    model = Recurrent(nn.GRU, outputs=1, width=2)
    model.embedding.requires_grad_(right)
    model.rnn.requires_grad_(right)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-2)
    return made(model, (words()[0], torch.tensor([[1.0], [-1.0]]).repeat(4, 1)), nn.MSELoss(), optimizer)


@planted("frozen")
def gpt2_of_which_the_last_norm_trains(right: bool) -> Built:
    model = gpt2()
    model.requires_grad_(right)
    model.transformer.ln_f.requires_grad_(True)
    return made(model, sentences(), optimizer=adam(model, 5e-3))


@planted("frozen")
def bert_whose_classifier_is_frozen_by_a_wrong_name(right: bool) -> Built:
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = right or "fc" in name or name.endswith("pooler.dense.bias")
    ids = torch.randint(0, 32, (8, 8))
    return made(model, {"input_ids": ids, "labels": torch.arange(8) % 4}, optimizer=adam(model, 1e-3))


@planted("frozen", parameters=("0.weight", "2.weight"))
def only_the_biases_train(right: bool) -> Built:
    model = mlp(3, 6, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = right or name.endswith("bias")
    return made(model, classes(width=3), nn.CrossEntropyLoss(), adam(model, 5e-2))


@planted("frozen", parameters=("0.weight", "0.bias", "2.weight", "2.bias"), raises=True)
def everything_is_frozen(right: bool) -> Built:
    model = mlp(10, 32, 4).requires_grad_(right)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("stale_optimizer", parameters=("0.weight", "0.bias", "2.weight", "2.bias"))
def optimizer_of_the_model_of_an_earlier_cell(right: bool) -> Built:
    model = mlp(10, 32, 4)
    optimizer = adam(model)
    model = mlp(10, 32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model) if right else optimizer)


@planted("stale_optimizer", "frozen", parameters=("2.weight", "2.bias"))
def head_replaced_after_the_optimizer_over_a_frozen_body(right: bool) -> Built:
    model = mlp(10, 32, 10)
    model[0].requires_grad_(False)
    optimizer = adam(model, 5e-2)
    model[2] = nn.Linear(32, 4)
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model, 5e-2) if right else optimizer)


@planted("stale_optimizer")
def model_copied_after_the_optimizer(right: bool) -> Built:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = copy.deepcopy(model)
    return made(
        model,
        pictures(),
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if right else optimizer,
    )


@planted("stale_optimizer")
def weights_parametrized_after_the_optimizer(right: bool) -> Built:
    model = mlp(6, 24, 24, 1, activation=nn.Tanh)
    for layer in model[::2]:
        layer.bias = None
    optimizer = adam(model)
    for layer in model[::2]:
        parametrizations.weight_norm(layer)
    x = torch.randn(8, 6)
    return made(model, (x, torch.randn(8, 1)), nn.MSELoss(), adam(model) if right else optimizer)


@planted("stale_optimizer", parameters=("0.weight", "2.weight"))
def weights_initialized_by_new_parameters(right: bool) -> Built:
    model = mlp(8, 24, 1, activation=nn.Tanh)
    for layer in model[::2]:
        layer.bias.requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    for layer in model[::2]:
        layer.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty_like(layer.weight)))
    if right:
        optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    return made(model, (torch.randn(8, 8), torch.randn(8, 1)), nn.MSELoss(), optimizer)


class _ListedBlocks(nn.Module):
    def __init__(self, registered: bool):
        super().__init__()
        blocks = [mlp(2, 32, 2, activation=nn.Tanh), nn.Linear(2, 4)]
        self.blocks = nn.ModuleList(blocks) if registered else blocks
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x) * self.scale)


@planted("stale_optimizer", "frozen")
def blocks_in_a_plain_list(right: bool) -> Built:
    model = _ListedBlocks(right)
    return made(model, classes(4, 2), nn.CrossEntropyLoss(), adam(model, 5e-2))


@planted("stale_optimizer")
def optimizer_has_the_embedding_alone(right: bool) -> Built:
    model = Tagger(width=4)
    known = model.parameters() if right else model.embedding.parameters()
    ids = torch.randint(0, 6, (8, 6))
    return made(model, (ids, ids.roll(1, 1) % 5), F.cross_entropy, torch.optim.Adam(known, lr=5e-2))


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
