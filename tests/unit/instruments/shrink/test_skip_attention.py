"""Attention by torch's own functions is replaced in all layers but the last, and comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdebug_magics
from tests.unit.instruments.shrink.small_models import Attending, Block, Plain

X = torch.randn(2, 3, 8)


class Weighing(nn.Module):
    """Attention whose weights are asked for."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x)
        assert weights.shape[-2] == weights.shape[-1]
        return x + mixed + weights.mean()


class Flat(Weighing):
    """Without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Flat, self).forward(one) for one in x])


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 6, enable_nested_tensor=False)


MODELS: dict[str, Any] = {
    "function": lambda: Plain(6, Attending),
    "module": transformer,
    "weights": lambda: Plain(6, Weighing),
    "no batch": lambda: Plain(6, Flat),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_words_look_at_each_other_in_the_last_layer_alone(name: str, *, training: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train(training)
    wanted = model(X)
    report = torchdebug_magics.shrink(model, X, layers=3, skip_attention=True)
    assert not report.undone, str(report)
    assert report.skipped_attention == 2
    assert "attention skipped in 2 layers" in report.verdict
    out = model(X)
    assert out.shape == wanted.shape
    out.sum().backward()
    assert [path for path, one in model.named_parameters() if one.grad is None] == []
    torchdebug_magics.shrink(model, undo=True)
    assert torch.equal(model(X), wanted)
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_copy_skips_by_itself() -> None:
    model = Plain(6, Attending)
    torchdebug_magics.shrink(model, X, skip_attention=True)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not torch.equal(twin(X), model(X)), "the copy runs its own layers"


def test_it_can_be_asked_for_later_and_twice() -> None:
    model = Plain(6, Attending)
    torchdebug_magics.shrink(model, X, layers=4)
    for _ in range(2):
        report = torchdebug_magics.shrink(model, X, layers=4, skip_attention=True)
        assert report.skipped_attention == 3, str(report)
    torchdebug_magics.shrink(model, undo=True)
    assert not any("forward" in vars(part) for part in model.modules())


def test_layers_without_attention_are_left() -> None:
    model = Plain(6, Block)
    report = torchdebug_magics.shrink(model, X, skip_attention=True)
    assert report.undone
    assert "none of its layers calls" in report.reason
    assert len(model.blocks) == 6
