"""Models of which the outputs are the same whatever the input: norms over one value, variables that are not read.

Where such a norm is the reason, both slugs are right.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.unit.instruments.overfit.case import Built, Case, made, planted
from tests.unit.instruments.overfit.trainings.models import adam, classes, gpt2, mlp, words

__all__ = ["CASES"]


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


CASES = tuple(value for value in globals().values() if isinstance(value, Case))
