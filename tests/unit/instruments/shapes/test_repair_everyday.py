"""Mistakes of every day whose repair is one line of the user's: long tables, tokens for a batch, heads, tuples, masks."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from tests.unit.instruments.shapes.planted import Case, Parts, Planted, check

PLANTED = Planted()
CASES, case = PLANTED.cases, PLANTED.case


@case("", "add", "`e + self.pos` cannot broadcast", fix="e + self.pos[:, :e.size(-2)]")
def a_table_of_positions_longer_than_the_sequence() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, ids: Any) -> Any:
            e = self.emb(ids)
            return e + self.pos

    return Net(emb=nn.Embedding(50, 16), pos=nn.Parameter(torch.zeros(1, 64, 16))), torch.ones(2, 10, dtype=torch.long)


@case("", "add", "`h + self.pos` cannot broadcast", fix="h + self.pos[:h.size(-2)]")
def a_table_of_positions_for_a_series() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h = self.lift(x)
            return h + self.pos

    return Net(lift=nn.Linear(3, 8), pos=nn.Parameter(torch.zeros(30, 8))), torch.randn(2, 12, 3)


@case(
    "",
    "cat",
    "`torch.cat([self.cls, p], dim=1)` cannot take `cls` of 1 x 1 x 8, `p` of 4 x 16 x 8 from",
    " `patch`: dimension 0 of `cls` is 1, and 4 would fit",
    fix="torch.cat([self.cls.expand(p.size(0), -1, -1), p], dim=1)",
)
def a_class_token_for_the_whole_batch() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            p = self.patch(x).flatten(2).transpose(1, 2)
            return torch.cat([self.cls, p], dim=1)

    return Net(patch=nn.Conv2d(3, 8, 8, 8), cls=nn.Parameter(torch.zeros(1, 1, 8))), torch.randn(4, 3, 32, 32)


@case("attn", "view", "cannot split 30 into 4 x 7 = 28", fix="attn.heads = 5\nattn.width = 6")
def heads_that_do_not_divide() -> tuple[Any, ...]:
    class Attention(Parts):
        def __init__(self) -> None:
            super().__init__(query=nn.Linear(30, 30))
            self.heads, self.width = 4, 30 // 4

        def forward(self, x: Any) -> Any:
            b, t, d = x.shape
            q = self.query(x).view(b, t, self.heads, self.width).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(b, t, d)

    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.attn(x)

    return Net(attn=Attention()), torch.randn(2, 5, 30)


_PASSED_ON = "register_forward_hook(lambda module, args, output: output[0])"


@case("head", None, "`states` 2 x 5 x 8", "`pooled` 2 x 8", fix="self.head(out['states'])")
def a_mapping_where_a_tensor_is_wanted() -> tuple[Any, ...]:
    class Encoder(Parts):
        def forward(self, x: Any) -> Any:
            h = self.lift(x)
            return UserDict(states=h, pooled=h.mean(1))

    class Net(Parts):
        def forward(self, x: Any) -> Any:
            out = self.encoder(x)
            return self.head(out)

    return Net(encoder=Encoder(lift=nn.Linear(3, 8)), head=nn.Linear(8, 2)), torch.randn(2, 5, 3)


@case("attn", "multi_head_attention_forward", "expects key_padding_mask of 2 x 7", fix="mask = F.pad(mask, (1, 0))")
def a_mask_that_knows_nothing_of_the_class_token() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, mask: Any) -> Any:
            h = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)
            out, _ = self.attn(h, h, h, key_padding_mask=mask)
            return out

    net = Net(attn=nn.MultiheadAttention(8, 2, batch_first=True), cls=nn.Parameter(torch.zeros(1, 1, 8)))
    return net, torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)


@case("attn", "multi_head_attention_forward", "expects key_padding_mask of 3 x 7", fix="")
def a_mask_of_another_batch() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, mask: Any) -> Any:
            out, _ = self.attn(x, x, x, key_padding_mask=mask)
            return out

    return Net(attn=nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(3, 7, 8), torch.zeros(2, 7, dtype=torch.bool)


@case("", "__getitem__", "`squeeze` removed the batch dimension", fix="h.squeeze(1)")
def a_batch_of_one_squeezed_away() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            _, h = self.rnn(x)
            h = h.transpose(0, 1)
            h = h.squeeze()
            return self.fc(h)[:, 0]

    return Net(rnn=nn.GRU(4, 6, batch_first=True), fc=nn.Linear(6, 2)), torch.randn(1, 5, 4)


CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_an_everyday_mistake_is_explained_and_repaired(one: Case) -> None:
    check(one)
