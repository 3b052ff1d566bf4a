"""Tables that a model holds, such as masks and positions: too short for the sequence, or of another width than a head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.instruments.shapes.planted import Case, Parts, Planted, broken, check

PLANTED = Planted()
CASES, case = PLANTED.cases, PLANTED.case

IDS = torch.arange(48).view(2, 24)


class Scores(nn.Module):
    """Attention of a sequence to itself, with a mask of its own."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, x: Any) -> Any:
        many = x.size(1)
        scores = x @ x.transpose(-2, -1)
        scores = scores.masked_fill(self.mask[:many, :many] == 0, -1e9)
        return scores.softmax(-1) @ x


@case("", "masked_fill", "24 and 16", fix="model = Scores(24)")
def a_causal_mask_that_is_too_short() -> tuple[Any, ...]:
    return Scores(16), torch.randn(2, 24, 8)


class Attention(nn.Module):
    """With weights, and a mask to be added."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.register_buffer("mask", torch.full((longest, longest), float("-inf")).triu(1))

    def forward(self, x: Any) -> Any:
        return self.q(x) @ x.transpose(-2, -1) + self.mask[: x.size(1), : x.size(1)]


@case("att", "add", "12 and 8", fix="att = Attention(8, 12)")
def a_mask_beside_weights() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.att(self.fc(x))

    return Net(fc=nn.Linear(4, 8), att=Attention(8, 8)), torch.randn(2, 12, 4)


class Sinusoids(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1, longest: int = 20) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, x: Any) -> Any:
        x = x + self.table[: x.size(1)]
        return self.dropout(x)


class Words(Parts):
    def forward(self, ids: Any) -> Any:
        return self.pos(self.emb(ids))


@case("pos", "add", "8 and 16 in the last dimension", fix="pos = Sinusoids(8, longest=30)")
def positions_of_another_width() -> tuple[Any, ...]:
    return Words(emb=nn.Embedding(50, 8), pos=Sinusoids(16, longest=30)), IDS


class Rotary(nn.Module):
    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("speeds", 1.0 / base ** (torch.arange(0, width, 2).float() / width), persistent=False)

    def forward(self, q: Any) -> Any:
        angles = torch.outer(torch.arange(q.size(-2)).float(), self.speeds)
        turns = torch.cat([angles, angles], -1)
        one, other = q.chunk(2, -1)
        return q * turns.cos() + torch.cat([-other, one], -1) * turns.sin()


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], 4, -1).transpose(1, 2)


@case("rope", "mul", "8 and 32 in the last dimension", fix="rope = Rotary(8)")
def rotations_of_the_whole_width() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.rope(heads(self.q(x)))

    return Net(q=nn.Linear(32, 32), rope=Rotary(32)), torch.randn(2, 6, 32)


@case("", "mul", "4 and 6 in dimension -2", fix="q * self.cos[:6][None, :, None, :]")
def rotations_beside_heads() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            q = self.q(x).view(2, 6, 4, 8)
            return q * self.cos[:6]

    return Net(q=nn.Linear(32, 32), cos=torch.rand(64, 8)), torch.randn(2, 6, 32)


class Spectrum(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(length))

    def forward(self, wave: Any) -> Any:
        return torch.stft(wave, 64, 32, window=self.window, return_complex=True).abs()


@case("", "stft", "`window` of 128: dimension 0 of `window` is 128, and 64 would fit", fix="model = Spectrum(64)")
def a_window_of_another_length() -> tuple[Any, ...]:
    return Spectrum(128), torch.randn(2, 1000)


class Order(nn.Module):
    def __init__(self, many: int) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(many))

    def forward(self, ids: Any) -> Any:
        return ids + self.order[torch.arange(ids.size(1))]


@case("", "__getitem__", "selects position 23 of dimension 0, which has 16 (0 to 15)", fix="model = Order(24)")
def an_order_that_ends_too_soon() -> tuple[Any, ...]:
    return Order(16), IDS


@case("", "mul", "16 and 9 in the last dimension", fix="self.scale[:, None, None] * y")
def a_scale_for_each_channel() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            return x + self.scale * y

    return Net(conv=nn.Conv2d(16, 16, 3, padding=1), scale=nn.Parameter(torch.ones(16))), torch.randn(2, 16, 9, 9)


@case(
    "",
    "cat",
    "`torch.cat([self.token, h.transpose(1, 2)], 1)` cannot take `token` of 1 x 1 x 16,",
    " `h.transpose(1, 2)` of 1 x 16 x 8 from `conv`: the last dimension of `h.transpose(1, 2)` is",
    " 8, and 16 would fit",
    fix="token = nn.Parameter(torch.zeros(1, 1, 8))",
)
def a_token_wider_than_the_patches() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h = self.conv(x).flatten(2)
            return torch.cat([self.token, h.transpose(1, 2)], 1)

    return Net(conv=nn.Conv2d(3, 8, 4, 4), token=nn.Parameter(torch.zeros(1, 1, 16))), torch.randn(1, 3, 16, 16)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_table_that_does_not_fit_is_made_anew(one: Case) -> None:
    check(one)


@pytest.mark.parametrize("one", [one for one in CASES if one.fix.startswith("model")], ids=lambda one: one.name)
def test_what_is_to_be_typed_does_it_for_real(one: Case) -> None:
    model, *inputs = one.build()
    with pytest.raises((RuntimeError, IndexError)):
        model(*inputs)
    names: dict[str, Any] = dict(globals())
    exec(one.fix, names)
    names["model"](*inputs)


def test_features_are_not_cut_away_from_a_table_of_unknown_numbers() -> None:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return heads(self.q(x)) * self.cos[: x.size(1)]

    _, failure = broken(lambda: (Net(q=nn.Linear(32, 32), cos=torch.rand(64, 16)), torch.randn(2, 6, 32)))
    assert failure.fixes == ()


class Loud(nn.Module):
    made = 0

    def __init__(self, many: int) -> None:
        super().__init__()
        if many > 4:
            msg = "at most 4"
            raise ValueError(msg)
        print("a table of", many, torch.rand(1))
        self.register_buffer("table", torch.arange(many))

    def forward(self, x: Any) -> Any:
        return x + self.table


def test_a_constructor_that_is_tried_is_not_heard_and_may_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.t(x)

    for many, fixes in ((4, ["t = Loud(4)"]), (5, [])):
        net = Net(t=Loud(3))
        capsys.readouterr()
        before = torch.get_rng_state()
        _, failure = broken(lambda net=net, many=many: (net, torch.zeros(2, many)))
        assert [fix.code for fix in failure.fixes if "Loud" in fix.code] == fixes
        assert torch.equal(before, torch.get_rng_state())
        assert capsys.readouterr().out == ""
