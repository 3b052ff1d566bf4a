"""Weights that no step can move: frozen, unknown to the optimizer, or cut off from the loss."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it
from torch.nn.utils import parametrizations

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.models import Recurrent, Tagger, adam, bert, classes, cnn, gpt2, mlp, pictures, sentences, words

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
                features = self.body(x)
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


@planted("cut_graph", location_text="features = self.body(x)")
def features_under_no_grad(right: bool) -> Built:
    return _cut("no_grad", right)


@planted("cut_graph", location_text="features = torch.tensor(features.tolist())")
def features_made_anew_of_their_numbers(right: bool) -> Built:
    return _cut("tensor", right)


@planted("cut_graph", location_text="features = torch.round(features)")
def features_rounded(right: bool) -> Built:
    return _cut("round", right)


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
