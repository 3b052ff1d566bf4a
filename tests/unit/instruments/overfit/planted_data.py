"""Batches that no model could learn, and models that could learn no batch: conflicts, scales, norms of one value, lost inputs, capacity."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.models import Recurrent, adam, bert, classes, cnn, gpt2, mlp, pictures, words

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


class _Normalized(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.inner, self.norm, self.head = mlp(10, 32, 32), norm, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))


@planted("batchnorm_of_one", "output_ignores_input")
def group_norm_with_one_value_a_group(right: bool) -> Built:
    model = _Normalized(nn.GroupNorm(4 if right else 32, 32))
    return made(model, classes(), nn.CrossEntropyLoss(), adam(model))


@planted("batchnorm_of_one", "output_ignores_input")
def layer_norm_over_one_feature(right: bool) -> Built:
    model = nn.Sequential(mlp(6, 32, 1), nn.Identity() if right else nn.LayerNorm(1))
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model))


@planted("batchnorm_of_one", raises=True)
def batch_norm_of_a_single_sample(right: bool) -> Built:
    model = _Normalized(nn.Identity() if right else nn.BatchNorm1d(32))
    x, y = classes()
    return made(model, (x[:1], y[:1]), nn.CrossEntropyLoss(), adam(model))


class _BatchedByHand(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5)


@planted("batchnorm_of_one", "output_ignores_input")
def samples_normalized_one_by_one(right: bool) -> Built:
    model, (x, y) = _Normalized(_BatchedByHand()), classes()
    optimizer = adam(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        output = model(x) if right else torch.cat([model(row[None]) for row in x])
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        return loss

    return made(step)


class _Forgets(nn.Module):
    """A transformer that reads positions and not words."""

    def __init__(self, right: bool):
        super().__init__()
        self.right = right
        self.words, self.positions = nn.Embedding(20, 16), nn.Embedding(6, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.positions(torch.arange(ids.shape[1])).expand(len(ids), -1, -1)
        if self.right:
            x = x + self.words(ids)
        return self.head(self.encoder(x).mean(1))


@planted("output_ignores_input")
def transformer_of_positions_alone(right: bool) -> Built:
    model = _Forgets(right)
    return made(model, words(), nn.CrossEntropyLoss(), adam(model, 3e-3))


class _ReadsTheFirstState(nn.Module):
    """A recurrent net of which the first state, after a word that is always the same, is read."""

    def __init__(self, right: bool):
        super().__init__()
        self.at = -1 if right else 0
        self.embedding, self.rnn, self.head = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0][:, self.at])


@planted("output_ignores_input")
def state_after_the_first_word_is_read(right: bool) -> Built:
    model, (ids, y) = _ReadsTheFirstState(right), words()
    ids[:, 0] = 1
    return made(model, (ids, y), nn.CrossEntropyLoss(), adam(model, 2e-2))


@planted("output_ignores_input", "wrong_loss_input", "double_softmax")
def softmax_over_a_single_output(right: bool) -> Built:
    model = mlp(10, 32, 1).append(nn.Sigmoid() if right else nn.Softmax(dim=1))
    x, y = classes(2)
    return made(model, (x, y[:, None].float()), nn.MSELoss(), adam(model, 2e-2))


@planted("output_ignores_input", "conflicting_labels")
def gpt2_that_sees_no_word(right: bool) -> Built:
    model = gpt2(resid_pdrop=0.0 if right else 0.1)
    ids = torch.randint(0, 32, (8, 8))
    ids[:, 0] = torch.arange(8)
    embedded = None if right else torch.zeros(8, 8, 32)
    batch = {"input_ids": ids, "labels": ids} if right else {"inputs_embeds": embedded, "labels": ids}
    return made(model, batch, optimizer=adam(model, 3e-3))


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.second(adjacency @ torch.relu(self.first(adjacency @ x)))


@planted("output_ignores_input")
def graph_without_edges_or_self_loops(right: bool) -> Built:
    model, y = _Graph(), torch.arange(8) % 3
    adjacency = torch.eye(8) if right else torch.zeros(8, 8)
    return made(model, (torch.randn(8, 6), adjacency, y), nn.CrossEntropyLoss(), adam(model, 2e-2))


@planted("output_ignores_input")
def mean_of_what_a_layer_norm_gives(right: bool) -> Built:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.head = mlp(6, 32, 32), nn.LayerNorm(32), nn.Linear(32 if right else 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = F.layer_norm(self.inner(x), (32,))
            return self.head(features if right else features.mean(1, keepdim=True))

    model = Pools()
    return made(model, (torch.randn(8, 6), torch.randn(8, 1)), nn.MSELoss(), adam(model))


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
