"""Mistakes in an earlier line than the one that fails, or of a part that fits, and is used in another way than it was made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from tests.unit.instruments.shapes.planted import Case, Parts, Planted, broken, check

PLANTED = Planted()
CASES, case = PLANTED.cases, PLANTED.case


@case(
    "norm",
    "layer_norm",
    "`view` split 2 x 16 x 8 x 8 as if it were channels-last",
    fix="self.patch(x).permute(0, 2, 3, 1)",
)
def windows_of_channels_first() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            x = self.patch(x)
            b, h, w, c = x.shape
            windows = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
            return self.norm(windows)

    return Net(patch=nn.Conv2d(3, 16, 4, stride=4), norm=nn.LayerNorm(16)), torch.randn(2, 3, 32, 32)


@case("", "reshape", "`h // 4` is 3 // 4, which is 0", fix="img = img.permute(0, 2, 3, 1)")
def patches_of_a_picture_with_channels_first() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, img: Any) -> Any:
            b, h, w, c = img.shape
            patches = img.reshape(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, -1, 16 * c)
            return self.proj(patches)

    return Net(proj=nn.Linear(48, 8)), torch.randn(2, 3, 32, 32)


@case(
    "rnn",
    None,
    "expects a hidden state of 4 x 5 x 16",
    fix="h0 = torch.zeros(4, x.size(0), 16)\nc0 = torch.zeros(4, x.size(0), 16)",
)
def states_of_one_direction() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h0 = torch.zeros(2, x.size(0), 16)
            c0 = torch.zeros(2, x.size(0), 16)
            out, _ = self.rnn(x, (h0, c0))
            return self.fc(out[:, -1])

    return Net(rnn=nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), fc=nn.Linear(32, 3)), torch.randn(5, 11, 8)


@case("cell", "gru_cell", "expects a hidden state of 4 x 8", "gets 6 x 8", fix="h = torch.zeros(ids.size(0), 8)")
def a_state_for_each_step() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, ids: Any) -> Any:
            h = torch.zeros(ids.size(1), 8)
            for step in range(ids.size(1)):
                h = self.cell(self.emb(ids[:, step]), h)
            return h

    return Net(emb=nn.Embedding(30, 4), cell=nn.GRUCell(4, 8)), torch.ones(4, 6, dtype=torch.long)


@case("fc", "linear", "gets 7 from `rnn`: `out[:, :, -1]` made 3 x 7 of 3 x 7 x 8", fix="out[:, -1]")
def the_last_feature_for_the_last_step() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            out, _ = self.rnn(x)
            return self.fc(out[:, :, -1])

    return Net(rnn=nn.GRU(4, 8, batch_first=True), fc=nn.Linear(8, 2)), torch.randn(3, 7, 4)


@case("fc", "linear", "`self.conv(x).mean(dim=1)` made 2 x 7 x 7 of 2 x 16 x 7 x 7", fix="self.conv(x).mean(dim=(2, 3))")
def a_mean_of_the_channels() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(self.conv(x).mean(dim=1).flatten(1))

    return Net(conv=nn.Conv2d(3, 16, 3), fc=nn.Linear(16, 2)), torch.randn(2, 3, 9, 9)


@case("fc", "linear", "`self.emb(x).mean(-1)` made 3 x 7 of 3 x 7 x 16", fix="self.emb(x).mean(1)")
def a_mean_of_the_features() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(self.emb(x).mean(-1))

    return Net(emb=nn.Embedding(9, 16), fc=nn.Linear(16, 2)), torch.ones(3, 7, dtype=torch.long)


@case("fc", "linear", "made 2 x 5 x 8 of 5 x 8 and 5 x 8", fix="torch.stack([self.a(x), self.b(x)], dim=1)")
def parts_stacked_before_the_batch() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(torch.stack([self.a(x), self.b(x)]).flatten(1))

    return Net(a=nn.Linear(4, 8), b=nn.Linear(4, 8), fc=nn.Linear(16, 2)), torch.randn(5, 4)


@case("fc", "linear", "expects 16 features, gets 8 from `rnn`", fix="h = h.transpose(0, 1).flatten(1)")
def states_of_both_directions_at_once() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            _, h = self.rnn(x)
            return self.fc(h)

    return Net(rnn=nn.GRU(4, 8, batch_first=True, bidirectional=True), fc=nn.Linear(16, 2)), torch.randn(3, 7, 4)


@case("", "__setitem__", "`pe[:, 1::2]` selects 6 x 3", fix="pe[:, 1::2] = torch.cos(at * by)[..., :3]")
def an_odd_number_of_features() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            pe, at = torch.zeros(x.size(1), x.size(2)), torch.arange(x.size(1)).unsqueeze(1)
            by = torch.exp(torch.arange(0, x.size(2), 2) * -0.1)
            pe[:, 0::2] = torch.sin(at * by)
            pe[:, 1::2] = torch.cos(at * by)
            return x + pe

    return Net(), torch.randn(2, 6, 7)


@case("", "view", "`c // self.heads` is 20 // 3, with a remainder of 2", fix="")
def heads_that_leave_a_remainder_before() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            width = c // self.heads
            return self.q(x).view(b, t, self.heads, width)

    net = Net(q=nn.Linear(20, 20))
    net.heads = 3
    return net, torch.randn(2, 5, 20)


@case("", "__getitem__", "`h[-2]` selects position -2", fix="rnn = nn.GRU(8, 16, batch_first=True, bidirectional=True)")
def both_directions_of_one() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            _, h = self.rnn(x)
            return self.fc(torch.cat([h[-2], h[-1]], dim=1))

    return Net(rnn=nn.GRU(8, 16, batch_first=True), fc=nn.Linear(32, 2)), torch.randn(3, 6, 8)


@case("fc", "linear", "`view` made 64 rows of a batch of 32", fix="x.flatten(1)")
def a_batch_as_a_number_that_divides() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            x = self.conv(x)
            x = x.view(64, -1)
            return self.fc(x)

    return Net(conv=nn.Conv2d(1, 4, 3), fc=nn.Linear(4 * 6 * 6, 10)), torch.randn(32, 1, 8, 8)


@case("fc", "linear", "`div` of 5 and 5 x 1 paired every sample with every other", fix="")
def a_broadcast_by_accident() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            weight = self.weigh(x)
            return self.fc(weight.squeeze(-1) / weight)

    return Net(weigh=nn.Linear(6, 1), fc=nn.Linear(8, 2)), torch.randn(5, 6)


@case(
    "decoder.layers.0.multihead_attn",
    "multi_head_attention_forward",
    "`decoder.layers.0.multihead_attn` expects 16 features (embed_dim) in its key, gets 8 from the",
    " input `source`, the last dimension of 2 x 7 x 8",
    fix="memory_projection = nn.Linear(8, 16)\nmemory = self.memory_projection(memory)",
)
def a_decoder_wider_than_its_memory() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, source: Any, target: Any) -> Any:
            memory = self.encoder(source)
            return self.decoder(self.embed(target), memory)

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 16, batch_first=True), 1)
    net = Net(encoder=encoder, decoder=decoder, embed=nn.Embedding(9, 16))
    return net, torch.randn(2, 7, 8), torch.ones(2, 5, dtype=torch.long)


@case(
    "attn",
    "multi_head_attention_forward",
    "gets 6 x 3",
    fix="self.attn(x, x, x, key_padding_mask=mask)",
)
def a_mask_turned_for_nothing() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, mask: Any) -> Any:
            out, _ = self.attn(x, x, x, key_padding_mask=mask.t())
            return out

    net = Net(attn=nn.MultiheadAttention(16, 4, batch_first=True))
    return net, torch.randn(3, 6, 16), torch.zeros(3, 6, dtype=torch.bool)


@case(
    "",
    "einsum",
    "`einsum`: einsum(): output subscript j does not appear in the equation for any input operand",
    " (it gets `q` of 2 x 5 x 4, `k` of 2 x 7 x 4)",
)
def the_same_letter_twice() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.einsum("bid,bid->bij", q, k).softmax(-1)

    return Net(), torch.randn(2, 5, 4), torch.randn(2, 7, 4)


@case(
    "",
    "matmul",
    "`a @ b.T` cannot take `a` of 5 x 32 from `image`, `b.T` of 24 x 5 from `text`: dimension 0 of",
    " `b.T` is 24, and 32 would fit",
    fix="text = nn.Linear(10, 32)",
)
def two_towers_of_other_widths() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, image: Any, text: Any) -> Any:
            a, b = self.image(image), self.text(text)
            return a @ b.T

    return Net(image=nn.Linear(48, 32), text=nn.Linear(10, 24)), torch.randn(5, 48), torch.randn(5, 10)


@case(
    "",
    "bmm",
    "`torch.bmm(q, k.transpose(1, 2))` cannot take `q` of 2 x 8, `k.transpose(1, 2)` of 2 x 8 x 5",
    " from the input `k`: 2 x 1 x 8 would fit",
    fix="torch.bmm(q.unsqueeze(1), k.transpose(1, 2))",
)
def a_vector_for_each_sample() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), k)

    return Net(), torch.randn(2, 8), torch.randn(2, 5, 8)


@case("", "scatter_add", "cannot use the index `idx` of 6 along dimension", fix="out.scatter_add(0, idx.unsqueeze(-1).expand_as(h), h)")
def rows_scattered_by_their_index() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, idx: Any) -> Any:
            h = self.lift(x)
            out = torch.zeros(3, 8)
            return out.scatter_add(0, idx, h)

    return Net(lift=nn.Linear(4, 8)), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


@case("", "gather", "cannot use the index `last` of 3 along dimension", fix="out.gather(1, last[:, None, None].expand(-1, -1, 16))")
def the_last_step_of_each() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, last: Any) -> Any:
            out, _ = self.rnn(x)
            return self.fc(out.gather(1, last).squeeze(1))

    return Net(rnn=nn.GRU(8, 16, batch_first=True), fc=nn.Linear(16, 2)), torch.randn(3, 6, 8), torch.tensor([5, 3, 1])


class Block(Parts):
    def forward(self, x: Any) -> Any:
        h = self.conv(x)
        h += self.shortcut(x)
        return h.relu()


@case("1", "add_", "`h += self.shortcut(x)` cannot broadcast", fix="model[1].shortcut = nn.Conv2d(8, 16, 1, stride=2)")
def a_short_way_that_does_nothing() -> tuple[Any, ...]:
    first = Block(conv=nn.Conv2d(8, 8, 3, padding=1), shortcut=nn.Identity())
    return nn.Sequential(first, Block(conv=nn.Conv2d(8, 16, 3, 2, 1), shortcut=nn.Identity())), torch.randn(2, 8, 8, 8)


class Rows(Parts):
    def forward(self, x: Any) -> Any:
        h = self.second(F.relu(self.first(x)))
        return F.relu(h + x)


@case(
    "1",
    "add",
    "`h + x` cannot broadcast",
    fix="model[0].shortcut = nn.Identity()\nmodel[1].shortcut = nn.Linear(8, 16)\nh + self.shortcut(x)",
)
def a_short_way_of_rows() -> tuple[Any, ...]:
    first, second = (Rows(first=nn.Linear(8, wide), second=nn.Linear(wide, wide)) for wide in (8, 16))
    return nn.Sequential(first, second, nn.Linear(16, 2)), torch.randn(4, 8)


@case("out", "linear", "expects 16 features, gets 4", fix="y = y.transpose(1, 2).flatten(2)")
def heads_that_were_not_put_together() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y)

    return Net(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), torch.randn(3, 6, 16)


@case(
    "attn",
    "reshape",
    "cannot split 150 into 3 x 8 x 6 = 144",
    fix="attn.heads = 10\nattn.width = 5",
)
def heads_beside_queries_and_keys() -> tuple[Any, ...]:
    class Attention(Parts):
        def __init__(self) -> None:
            super().__init__(qkv=nn.Linear(50, 150))
            self.heads, self.width = 8, 50 // 8

        def forward(self, x: Any) -> Any:
            b, n, d = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)

    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.attn(x)

    return Net(attn=Attention()), torch.randn(2, 9, 50)


@case(
    "",
    "scaled_dot_product_attention",
    "`F.scaled_dot_product_attention(q, k, k)` cannot take `q` of 3 x 4 x 6 x 8, `k` of 3 x 2 x 6 x",
    " 8: dimension 1 of `k` is 2, and 4 would fit",
    fix="F.scaled_dot_product_attention(q, k, k, enable_gqa=True)",
)
def fewer_heads_of_keys() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            return F.scaled_dot_product_attention(q, k, k)

    return Net(), torch.randn(3, 4, 6, 8), torch.randn(3, 2, 6, 8)


@case("", None, "`out` is the tuple that `rnn` returns: (output, state); the output is 3 x 6 x 16", fix="out, _ = self.rnn(x)")
def a_state_that_was_forgotten() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            out = self.rnn(x)
            return self.fc(out[:, -1])

    return Net(rnn=nn.GRU(8, 16, batch_first=True), fc=nn.Linear(16, 2)), torch.randn(3, 6, 8)


@case("", None, "`h` is the tuple that `attn` returns: (output, weights)", fix="h, _ = self.attn(x, x, x)")
def weights_that_were_forgotten() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h = self.attn(x, x, x)
            return x + h

    return Net(attn=nn.MultiheadAttention(16, 4, batch_first=True)), torch.randn(2, 5, 16)


@case("fc", None, "holds `values` 2 x 8, `indices` 2 x 8", fix="self.fc(h.values)")
def a_maximum_with_its_places() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h = torch.max(x, dim=2)
            return self.fc(h)

    return Net(fc=nn.Linear(8, 2)), torch.randn(2, 8, 5)


@case("", "softmax", "`squeeze` removed the batch dimension", fix="self.fc(x).squeeze(-1)")
def scores_of_one_sample() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            scores = self.fc(x).squeeze()
            return scores.softmax(dim=1)

    return Net(fc=nn.Linear(8, 1)), torch.randn(1, 5, 8)


@case("", "mul", "8 and 4 in the last dimension", fix="p * t.permute(0, 3, 1, 2)")
def classes_of_square_pictures_last() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            p = self.conv(x).softmax(1)
            t = F.one_hot(y, 4).float()
            return (p * t).sum()

    return Net(conv=nn.Conv2d(3, 4, 3, padding=1)), torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_an_earlier_mistake_is_explained_and_repaired(one: Case) -> None:
    check(one)


def test_a_part_of_what_a_layer_gives_makes_that_layer_larger() -> None:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            mean, _ = self.encode(x).chunk(2, dim=-1)
            return self.decode(mean)

    _, failure = broken(lambda: (Net(encode=nn.Linear(32, 8), decode=nn.Linear(8, 32)), torch.randn(4, 32)))
    assert [fix.code for fix in failure.fixes if fix.verified] == ["decode = nn.Linear(4, 32)", "encode = nn.Linear(32, 16)"]


def test_a_head_with_the_weights_of_another_part_stays_tied() -> None:
    class Net(Parts):
        def forward(self, ids: Any) -> Any:
            h, _ = self.rnn(self.emb(ids))
            return self.head(h)

    net = Net(emb=nn.Embedding(40, 24), rnn=nn.GRU(24, 32, batch_first=True), head=nn.Linear(24, 40, bias=False))
    net.head.weight = net.emb.weight  # type: ignore[union-attr]  # as users tie them
    _, failure = broken(lambda: (net, torch.ones(2, 5, dtype=torch.long)))
    assert failure.fixes[0].code == "rnn = nn.GRU(24, 24, batch_first=True)"


def test_a_picture_too_small_for_a_kernel_is_told_which_size_would_do() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.Conv2d(4, 8, 5), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5), nn.Flatten())
    _, failure = broken(lambda: (nn.Sequential(net, nn.Linear(8, 2)), torch.randn(2, 3, 28, 28)))
    assert "input of 32 x 32 to 35 x 35" in [fix.code for fix in failure.fixes]
