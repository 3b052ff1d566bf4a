"""FLOPs against formulas by hand: 2 per multiply-add, and none for what only moves or adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.instruments.shapes.models import of
from torchdebug_magics.instruments.shapes.forward_table import examine_model

B, T, D, H, F = 2, 6, 16, 4, 32
X = torch.randn(B, T, D)
ATTENTION = 2 * B * T * 4 * D * D + 4 * B * T * T * D
LSTM = 2 * B * T * 4 * H * (D + H)


def attends(causal):
    return of(lambda _self, x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal))


MODELS = {
    "a vector": (lambda: nn.Linear(D, F), (torch.randn(D),), 2 * D * F),
    "conv": (lambda: nn.Conv2d(3, 8, 3, padding=1), (torch.randn(2, 3, 9, 9),), 2 * 2 * 8 * 9 * 9 * 3 * 9),
    "bilinear": (lambda: nn.Bilinear(5, 6, 7), (torch.randn(3, 5), torch.randn(3, 6)), 2 * 3 * 5 * 6 * 7),
    "lstm": (lambda: nn.LSTM(D, H, batch_first=True), (X,), LSTM),
    "attention": (lambda: nn.MultiheadAttention(D, H, batch_first=True), (X, X, X), ATTENTION),
    "sdpa": (lambda: attends(causal=False), (torch.randn(B, H, T, D),), 4 * B * H * T * T * D),
    "sdpa, causal": (lambda: attends(causal=True), (torch.randn(B, H, T, D),), 4 * B * H * T * T * D),
    "matrix by vector": (lambda: of(lambda _, a: a @ a[0]), (torch.randn(3, 5),), 2 * 3 * 5),
    "einsum": (lambda: of(lambda _, a: torch.einsum("bi,bj->ij", a, a)), (torch.randn(3, 5),), 2 * 3 * 5 * 5),
    "embedding": (lambda: nn.Embedding(10, 4), (torch.tensor([1, 2]),), 0),
    "elementwise": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(D)), (X,), 0),
}


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("name", MODELS)
def test_by_hand(name, real):
    make, args, flops = MODELS[name]
    assert examine_model(make(), *args, real=real).report.total_flops == flops


def test_packed_sequences_count_what_is_there():
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 2]), batch_first=True)
        return self.lstm(packed)[0].data

    model = of(forward, lstm=nn.LSTM(D, H, batch_first=True))
    assert examine_model(model, X).report.total_flops == 2 * 8 * 4 * H * (D + H)


def test_a_call_counts_what_runs_inside_it_and_each_call_once():
    model = of(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(D, D), b=nn.Sequential(nn.Linear(D, F), nn.Linear(F, D)))
    one = 2 * B * T * D * D
    rows = examine_model(model, X).report.rows
    assert [row.flops for row in rows] == [2 * one + 4 * one, one, one, 4 * one, 2 * one, 2 * one]


def test_what_has_no_formula_is_listed_and_what_moves_data_is_not():
    model = of(lambda _, x: nn.functional.layer_norm(torch.cat([x, x]).transpose(0, 1).reshape(-1, D), (D,)).softmax(-1))
    assert set(examine_model(model, X).report.uncounted_ops) == {"native_layer_norm", "_softmax"}
