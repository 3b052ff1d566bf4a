"""Broken models, unlike each other: each is to be explained in its own words and, where an edit repairs it, by that edit, tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from tests.unit.instruments.shapes.planted import Case, Planted, check

PLANTED = Planted()
CASES, case = PLANTED.cases, PLANTED.case


# ------------------------------------------------------------------------------------------------- pictures


@case(
    "features.3", "conv2d", "`features.3` expects 16 channels, gets 8 from `features.0`", fix="features[3] = nn.Conv2d(8, 32, 3, padding=1)"
)
def channels_between_convolutions() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1))

        def forward(self, image: Any) -> Any:
            return self.features(image)

    return Net(), torch.randn(2, 3, 16, 16)


@case(
    "2",
    "linear",
    "`2` expects 128 features",
    "gets 16 from `0`, the last dimension of 4 x 8 x 16 x 16",
    fix="model[2] = nn.Linear(2048, 5)\nmodel.insert(2, nn.Flatten())",
)
def sequential_without_flatten() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Linear(128, 5)), torch.randn(4, 3, 16, 16)


@case("", "conv2d", "`Conv2d` expects 3 or 4 dimensions, gets 2: `input` is 28 x 28", fix="input = input.unsqueeze(0)")
def one_bare_picture() -> tuple[Any, ...]:
    return nn.Conv2d(1, 3, 3), torch.randn(28, 28)


@case("pools.2", "max_pool2d", "`pools.2` has a kernel of 2 x 2, larger than its input of 1 x 1", fix="input of 8 x 8 or more")
def pooled_to_nothing() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for pool in self.pools:
                x = pool(x)
            return x.mean((2, 3))

    return Net(), torch.randn(2, 3, 6, 6)


@case("1", None, "`1` is a BatchNorm2d, which expects 4 dimensions, gets 2: 4 x 8", fix="model[1] = nn.BatchNorm1d(8)")
def batch_norm_of_the_wrong_kind() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(4, 5)


@case("bn", "batch_norm", "needs 2 values per channel", fix="model.eval()")
def batch_norm_of_one_row() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 6)
            self.bn = nn.BatchNorm1d(6)

        def forward(self, x: Any) -> Any:
            return self.bn(self.fc(x))

    return Net(), torch.randn(1, 4)


@case("norm", "group_norm", "`norm` expects 12 channels, gets 6 from `conv`", fix="norm = nn.GroupNorm(3, 6)")
def group_norm() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 1)
            self.norm = nn.GroupNorm(3, 12)

        def forward(self, x: Any) -> Any:
            return self.norm(self.conv(x))

    return Net(), torch.randn(2, 3, 8, 8)


@case(
    "",
    "cat",
    "`torch.cat([up, skip], dim=1)` cannot take `up` of 2 x 8 x 24 x 24, `skip` of 2 x 8 x 25 x 25",
    " from `enc`: the last dimension of `skip` is 25, and 24 would fit",
    fix="torch.cat([F.interpolate(up, size=skip.shape[2:]), skip], dim=1)",
)
def unet_skip() -> tuple[Any, ...]:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Conv2d(3, 8, 3, padding=1)
            self.mid = nn.Conv2d(8, 16, 3, padding=1)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = nn.Conv2d(16, 1, 1)

        def forward(self, x: Any) -> Any:
            skip = self.enc(x)
            mid = self.mid(F.max_pool2d(skip, 2))
            up = self.up(mid)
            return self.dec(torch.cat([up, skip], dim=1))

    return UNet(), torch.randn(2, 3, 25, 25)


@case(
    "decoder.0",
    "conv_transpose2d",
    "`decoder.0` expects 32 channels, gets 16 from `encoder.2`",
    fix="decoder[0] = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)",
)
def autoencoder_of_transposed_convolutions() -> tuple[Any, ...]:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
            self.decoder = nn.Sequential(nn.ConvTranspose2d(32, 8, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 3, 2, 1, 1))

        def forward(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

    return Auto(), torch.randn(2, 1, 28, 28)


@case("", "mse_loss", "28 x 28", "27 x 27", fix="decode = nn.ConvTranspose2d(4, 1, 1, stride=2, output_padding=1)")
def autoencoder_loss_inside() -> tuple[Any, ...]:
    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Conv2d(1, 4, 2, 2)
            self.decode = nn.ConvTranspose2d(4, 1, 1, 2)

        def forward(self, x: Any) -> Any:
            again = self.decode(self.encode(x))
            return F.mse_loss(again, x)

    return Auto(), torch.randn(2, 1, 28, 28)


@case("norm", "layer_norm", "`norm` expects 32 features, gets 64", fix="x = x.transpose(-2, -1)")
def vit_patches_not_turned() -> tuple[Any, ...]:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 32, 4, 4)
            self.norm = nn.LayerNorm(32)

        def forward(self, x: Any) -> Any:
            x = self.patch(x).flatten(2)
            x = self.norm(x)
            return x.mean(1)

    return Patches(), torch.randn(2, 3, 32, 32)


@case("", "add", "`self.b(x) + x`", "16 and 8 in dimension 1", fix="b = nn.Conv2d(8, 8, 3, padding=1)")
def residual_channels() -> tuple[Any, ...]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Conv2d(8, 16, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.b(x) + x

    return Block(), torch.randn(2, 8, 6, 6)


@case("up", "pixel_shuffle", "`up` expects input of 2 x 4 x 6 x 6, gets 2 x 3 x 6 x 6 from the input `x`", fix="")
def pixel_shuffle() -> tuple[Any, ...]:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.PixelShuffle(2)

        def forward(self, x: Any) -> Any:
            return self.up(x)

    return Up(), torch.randn(2, 3, 6, 6)


@case("stages.0.conv", "conv3d", "`stages.0.conv` expects 1 channels, gets 8", fix="clip = clip.transpose(1, 2)")
def video_with_time_before_channels() -> tuple[Any, ...]:
    class Stage(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.conv = nn.Conv3d(i, o, 3, padding=1)

        def forward(self, clip: Any) -> Any:
            return self.conv(clip)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Stage(1, 4), Stage(4, 8)])

        def forward(self, clip: Any) -> Any:
            for stage in self.stages:
                clip = stage(clip)
            return clip

    return Net(), torch.randn(2, 8, 1, 12, 12)


@case(
    "squeeze",
    "linear",
    "`squeeze` expects 4 features, gets 1 from the input `x`, the last dimension of 2 x 8 x 1 x 1",
    fix="w = w.flatten(1)\nsqueeze = nn.Linear(8, 8)",
)
def squeeze_and_excite() -> tuple[Any, ...]:
    class SE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.squeeze = nn.Linear(4, 8)

        def forward(self, x: Any) -> Any:
            w = F.adaptive_avg_pool2d(x, 1)
            w = self.squeeze(w)
            return x * w[:, :, None, None]

    return SE(), torch.randn(2, 8, 5, 5)


# --------------------------------------------------------------------------------------------- plain networks


@case("join", "bilinear", "`join` expects 5 features (in1_features)", fix="join = nn.Bilinear(4, 6, 3)")
def bilinear() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = nn.Bilinear(5, 6, 3)

        def forward(self, a: Any, b: Any) -> Any:
            return self.join(a, b)

    return Net(), torch.randn(2, 4), torch.randn(2, 6)


@case("fc", "linear", "`fc` has float32 weights, gets `x` in int64", fix="x = x.float()")
def whole_numbers_into_linear() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(x)

    return Net(), torch.ones(3, 4, dtype=torch.int64)


@case("enc.0", "linear", "`enc.0` has float16 weights, gets `x` in float32", fix="x = x.half()")
def half_weights() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).half()

        def forward(self, x: Any) -> Any:
            return self.enc(x)

    return Net(), torch.randn(3, 4)


@case("conv", "conv2d", "`conv` has float32 weights, gets `x` in float64", fix="x = x.float()")
def doubles_into_a_convolution() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, x: Any) -> Any:
            return self.conv(x)

    return Net(), torch.randn(1, 3, 4, 4, dtype=torch.float64)


@case("", "sub", "`a - b`", fix="a - b.transpose(0, 1)")
def one_is_turned() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            d = a - b
            return d.pow(2).mean()

    return Net(), torch.randn(4, 6), torch.randn(6, 4)


# ---------------------------------------------------------------------------------------------------- words


@case("emb", "embedding", "gets index -1", fix="")
def negative_index() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4)

        def forward(self, ids: Any) -> Any:
            return self.emb(ids).mean(1)

    return Net(), torch.tensor([[3, -1, 0]])


@case("emb", "embedding", "expects integer indices", "`ids` is float32", fix="ids = ids.long()")
def ids_in_floating_point() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4, padding_idx=0)

        def forward(self, ids: Any) -> Any:
            return self.emb(ids).mean(1)

    return Net(), torch.tensor([[3.0, 1.0]])


@case("pos", "embedding", "`pos` has 16 rows (0 to 15), gets index 19", fix="pos = nn.Embedding(20, 8)")
def positions_beyond_the_table() -> tuple[Any, ...]:
    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.pos = nn.Embedding(50, 8), nn.Embedding(16, 8)
            self.head = nn.Linear(8, 50, bias=False)

        def forward(self, ids: Any) -> Any:
            at = torch.arange(ids.shape[1])
            return self.head(self.tok(ids) + self.pos(at))

    return GPT(), torch.randint(0, 50, (2, 20))


@case("rnn", None, "`rnn` expects a hidden state of 1 x 7 x 6", "gets 1 x 2 x 6", fix="rnn = nn.GRU(4, 6, batch_first=True)")
def batch_first_forgotten() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 6)

        def forward(self, x: Any) -> Any:
            h0 = torch.zeros(1, x.shape[0], 6)
            out, _ = self.rnn(x, h0)
            return out

    return Net(), torch.randn(2, 7, 4)


@case("decoder", None, "`decoder` expects a hidden state of 1 x 3 x 6, gets 3 x 6 from `encoder`", fix="self.decoder(y, h.unsqueeze(0))")
def seq2seq_state() -> tuple[Any, ...]:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.GRU(4, 6, batch_first=True), nn.GRU(5, 6, batch_first=True)

        def forward(self, x: Any, y: Any) -> Any:
            states, _ = self.encoder(x)
            h = states[:, -1]
            out, _ = self.decoder(y, h)
            return out + h[:, None]

    return Seq2Seq(), torch.randn(3, 7, 4), torch.randn(3, 5, 5)


@case("cell", "gru_cell", "`cell` expects a hidden state of 3 x 6, gets 3 x 5 from `start`", fix="cell = nn.GRUCell(4, 5)")
def cell_state() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(2, 5)
            self.cell = nn.GRUCell(4, 6)

        def forward(self, x: Any, z: Any) -> Any:
            h = self.start(z)
            for step in range(x.shape[1]):
                h = self.cell(x[:, step], h)
            return h

    return Net(), torch.randn(3, 2, 4), torch.randn(3, 2)


@case("conv", "conv1d", "`conv` expects 8 channels, gets 7", "last in 2 x 7 x 8", fix="self.conv(self.emb(ids).transpose(-2, -1))")
def text_cnn() -> tuple[Any, ...]:
    class TextCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20, 8)
            self.conv = nn.Conv1d(8, 16, 3)

        def forward(self, ids: Any) -> Any:
            return self.conv(self.emb(ids)).amax(-1)

    return TextCNN(), torch.randint(0, 20, (2, 7))


@case(
    "attn",
    "matmul",
    "`q @ k` cannot take `q` of 2 x 4 x 7 x 8 from `attn.qkv`, `k` of 2 x 4 x 7 x 8 from",
    " `attn.qkv`: dimension 2 of `k` is 7, and 8 would fit",
    fix="q @ k.transpose(-2, -1)",
)
def attention_by_hand() -> tuple[Any, ...]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Any) -> Any:
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
            scores = q @ k / 8**0.5
            return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Any) -> Any:
            return x + self.attn(x)

    return Block(), torch.randn(2, 7, 32)


@case("blocks.0", "matmul", "`q @ k`", fix="q @ k.transpose(-2, -1)")
def the_same_line_in_each_block() -> tuple[Any, ...]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return (q @ k).softmax(-1) @ v

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = x + block(x)
            return x

    return Net(), torch.randn(2, 5, 8)


@case("", "view", "not a view", "`transpose`", fix="o.transpose(1, 2).reshape(b, t, d)")
def heads_put_together_by_view() -> tuple[Any, ...]:
    class Merge(nn.Module):
        def forward(self, o: Any) -> Any:
            b, h, t, w = o.shape
            d = h * w
            return o.transpose(1, 2).view(b, t, d)

    return Merge(), torch.randn(2, 4, 7, 8)


@case("", "masked_fill", "mask", "bool", fix="s.masked_fill(mask.bool(), -1000000000.0)")
def a_mask_of_floats() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, s: Any, mask: Any) -> Any:
            return s.masked_fill(mask, -1e9).softmax(-1)

    return Net(), torch.randn(2, 5, 5), torch.ones(2, 5, 5)


@case(
    "",
    None,
    "`Transformer` expects tgt of 2 x 7 x 16, gets 2 x 5 x 16 from the input `tgt`, as src is 2 x 7",
    " x 16",
    fix="model = nn.Transformer(16, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=32, batch_first=True)",
)
def transformer_batch() -> tuple[Any, ...]:
    return nn.Transformer(16, 4, 1, 1, 32), torch.randn(2, 7, 16), torch.randn(2, 5, 16)


@case(
    "",
    "scaled_dot_product_attention",
    "`F.scaled_dot_product_attention(q, k, v, attn_mask=mask)` cannot take `q` of 2 x 4 x 7 x 8,",
    " `k` of 2 x 4 x 7 x 8 from the input `q`, `v` of 2 x 4 x 7 x 8 from the input `q`, `mask` of 2",
    " x 7: dimension 0 of `mask` is 2, and 7 would fit",
    fix="F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])",
)
def sdpa_mask() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, q: Any, mask: Any) -> Any:
            k = v = q
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Net(), torch.randn(2, 4, 7, 8), torch.zeros(2, 7, dtype=torch.bool)


@case("norm", "rms_norm", "`norm` expects 12 features, gets 8 from `fc`", fix="norm = nn.RMSNorm(8)")
def rms_norm() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 8)
            self.norm = nn.RMSNorm(12)

        def forward(self, x: Any) -> Any:
            return self.norm(self.fc(x))

    return Net(), torch.randn(2, 5, 4)


@case(
    "",
    "einsum",
    "`torch.einsum('bij,bjk->bik', a, b)` cannot take `a` of 2 x 3 x 4, `b` of 2 x 3 x 4: dimension",
    " 1 of `b` is 3, and 4 would fit",
    fix="torch.einsum('bij,bjk->bik', a, b.transpose(-2, -1))",
)
def einsum_letters() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return torch.einsum("bij,bjk->bik", a, b)

    return Net(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)


@case("", "bmm", "`torch.bmm(q, k)` cannot take `q` of 2 x 3 x 5 x 4, `k` of 2 x 3 x 4 x 5", fix="q @ k")
def bmm_with_heads() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.bmm(q, k)

    return Net(), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 4, 5)


# ------------------------------------------------------------------------------------ several inputs, and graphs


@case(
    "",
    "cat",
    "`torch.cat([picture, numbers], dim=1)` cannot take `picture` of 3 x 8 x 1 x 1 from `conv`,",
    " `numbers` of 3 x 5: 3 x 5 x 1 x 1 would fit",
    fix="torch.cat([picture.flatten(1), numbers], dim=1)",
)
def multi_input_dimensions() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, image: Any, numbers: Any) -> Any:
            picture = F.adaptive_avg_pool2d(self.conv(image), 1)
            return torch.cat([picture, numbers], dim=1)

    return Net(), torch.randn(3, 3, 8, 8), torch.randn(3, 5)


@case(
    "",
    "stack",
    "`torch.stack([a, b])` cannot take `a` of 3 x 4, `b` of 3 x 6: the last dimension of `b` is 6,",
    " and 4 would fit",
    fix="torch.cat([a, b], dim=1)",
)
def stack_of_unequal() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return torch.stack([a, b])

    return Net(), torch.randn(3, 4), torch.randn(3, 6)


@case("", "gather", "index `picked` of 3", fix="scores.gather(1, picked.unsqueeze(-1))")
def gather_without_dimension() -> tuple[Any, ...]:
    class Q(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 6)

        def forward(self, state: Any, picked: Any) -> Any:
            scores = self.net(state)
            return scores.gather(1, picked)

    return Q(), torch.randn(3, 4), torch.tensor([1, 0, 5])


@case("", "gather", "which has 6 (0 to 5), gets index 6", fix="")
def gather_beyond() -> tuple[Any, ...]:
    class Q(nn.Module):
        def forward(self, scores: Any, picked: Any) -> Any:
            return scores.gather(1, picked[:, None])

    return Q(), torch.randn(3, 6), torch.tensor([1, 6, 5])


@case("", "index_add_", "gets index 4", fix="")
def graph_messages() -> tuple[Any, ...]:
    class GNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 5)

        def forward(self, x: Any, edges: Any) -> Any:
            messages = self.lin(x)[edges[0]]
            return torch.zeros(x.shape[0], 5).index_add_(0, edges[1], messages)

    return GNN(), torch.randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 4]])


@case("", "__getitem__", "indexes 3 dimensions", "has 2", fix="x = x.unsqueeze(0)")
def too_many_subscripts() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2)

        def forward(self, x: Any) -> Any:
            last = x[:, -1, :]
            return self.fc(last)

    return Net(), torch.randn(3, 5)


@case("", "__getitem__", "`at`, which is float32", fix="table[at.long()]")
def a_subscript_of_floats() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, table: Any, at: Any) -> Any:
            return table[at]

    return Net(), torch.randn(3, 5), torch.tensor([0.0, 2.0])


@case("", None, "`b, _, h, w = x.shape` unpacks 4 sizes, and `x` has 3 dimensions: 3 x 8 x 8", fix="x = x.unsqueeze(0)")
def unpacking_a_picture() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Any) -> Any:
            b, _, h, w = x.shape
            return self.conv(x).view(b, 4, h * w)

    return Net(), torch.randn(3, 8, 8)


@case("enc", None, "unpacks 2 sizes", "`tokens` has 3 dimensions", fix="tokens = tokens.squeeze(1)")
def unpacking_too_many() -> tuple[Any, ...]:
    class Enc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4)

        def forward(self, tokens: Any) -> Any:
            b, t = tokens.size()
            return self.emb(tokens).view(b, t * 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = Enc()

        def forward(self, tokens: Any) -> Any:
            return self.enc(tokens)

    return Net(), torch.randint(0, 10, (3, 1, 5))


@case("", "view", "`x.view(-1, 400)`", "4 x 16 x 6 x 6 from `conv`", "2,304 elements", fix="x.flatten(1)\nfc = nn.Linear(576, 10)")
def a_hard_coded_view() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3)
            self.fc = nn.Linear(400, 10)

        def forward(self, x: Any) -> Any:
            x = self.conv(x)
            x = x.view(-1, 400)
            return self.fc(x)

    return Net(), torch.randn(4, 3, 8, 8)


@case("", "view", "`x.view(64, 20)`", "640 elements, not 1,280", fix="x.view(-1, 20)")
def a_hard_coded_batch() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(20, 3)

        def forward(self, x: Any) -> Any:
            return self.fc(x.view(64, 20))

    return Net(), torch.randn(32, 4, 5)


@case("", "permute", "`x.permute(0, 2, 3, 1)` cannot take `x` of 3 x 8 x 8", fix="x = x.unsqueeze(0)")
def permute_of_a_single_picture() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Any) -> Any:
            h = x.permute(0, 2, 3, 1)
            return self.norm(h)

    return Net(), torch.randn(3, 8, 8)


@case("", "expand", "3", fix="mean.unsqueeze(-1).expand(3, 4)")
def expand_of_rows() -> tuple[Any, ...]:
    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            mean = x.mean(1)
            return x - mean.expand(3, 4)

    return Net(), torch.randn(3, 4)


@case("", "transpose", "`self.fc(x).transpose(1, 2)` cannot take `self.fc(x)` of 3 x 2", fix="")
def transpose_of_two_dimensions() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(x).transpose(1, 2)

    return Net(), torch.randn(3, 4)


@case("", "unflatten", "splits a dimension of 10 into 3 x 4 = 12", fix="")
def unflatten() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 10)

        def forward(self, x: Any) -> Any:
            return self.fc(x).unflatten(1, (3, 4))

    return Net(), torch.randn(3, 4)


# ------------------------------------------------------------------------------------------------- losses inside


@case("", "cross_entropy", "expects a target of 3", "gets 3 x 1", fix="F.cross_entropy(logits, y.squeeze(1))")
def target_with_a_column() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)

        def forward(self, x: Any, y: Any) -> Any:
            logits = self.fc(x)
            return F.cross_entropy(logits, y)

    return Net(), torch.randn(3, 4), torch.tensor([[1], [0], [4]])


@case("loss", "cross_entropy", "`y` is float32", fix="y = y.long()")
def target_of_floats() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Any, y: Any) -> Any:
            return self.loss(self.fc(x), y)

    return Net(), torch.randn(3, 4), torch.tensor([1.0, 0.0, 4.0])


@case("", "cross_entropy", "classes are dimension 1", fix="F.cross_entropy(logits.transpose(-2, -1), labels)")
def language_model_loss() -> tuple[Any, ...]:
    class LM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20)

        def forward(self, ids: Any, labels: Any) -> Any:
            logits = self.head(self.emb(ids))
            return F.cross_entropy(logits, labels)

    return LM(), torch.randint(0, 20, (2, 7)), torch.randint(0, 20, (2, 7))


@case(
    "criterion",
    "binary_cross_entropy_with_logits",
    "`binary_cross_entropy_with_logits` compares",
    fix="self.criterion(self.fc(x).squeeze(-1), y)",
)
def binary_loss() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 1)
            self.criterion = nn.BCEWithLogitsLoss()

        def forward(self, x: Any, y: Any) -> Any:
            return self.criterion(self.fc(x), y)

    return Net(), torch.randn(3, 4), torch.ones(3)


@case("", "mse_loss", "of 3 x 5 from `fc`", "of 3 x 2", fix="fc = nn.Linear(4, 2)")
def regression_width() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)

        def forward(self, x: Any, y: Any) -> Any:
            return F.mse_loss(self.fc(x), y)

    return Net(), torch.randn(3, 4), torch.randn(3, 2)


@case("", "add_", "`out += identity`", "8 and 16", fix="down = nn.Conv2d(8, 16, 1, stride=2)")
def residual_stride() -> tuple[Any, ...]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, padding=1)
            self.down = nn.Conv2d(8, 16, 1)

        def forward(self, x: Any) -> Any:
            identity = self.down(x)
            out = self.conv2(F.relu(self.conv1(x)))
            out += identity
            return F.relu(out)

    return Block(), torch.randn(2, 8, 16, 16)


@case(
    "depthwise",
    "conv2d",
    "`depthwise` expects 16 channels, gets 24",
    fix="depthwise = nn.Conv2d(24, 24, 3, groups=24)\npointwise = nn.Conv2d(24, 32, 1)",
)
def depthwise_separable() -> tuple[Any, ...]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise, self.pointwise = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 1)

        def forward(self, x: Any) -> Any:
            return self.pointwise(self.depthwise(x))

    return Block(), torch.randn(2, 24, 8, 8)


@case("", "view", "128 from `fc` has 384 elements, not divisible by 8 x 5 x 5 = 200", fix="self.fc(z).view(-1, 8, 4, 4)")
def decoder_of_rows() -> tuple[Any, ...]:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(10, 128)
            self.up = nn.ConvTranspose2d(8, 4, 4, 2, 1)

        def forward(self, z: Any) -> Any:
            h = self.fc(z).view(-1, 8, 5, 5)
            return self.up(h)

    return Decoder(), torch.randn(3, 10)


@case("", "masked_fill", "`att` of 2 x 4 x 9 x 9", "16 x 16", fix="att.masked_fill((~self.mask)[:att.size(-2), :att.size(-1)], -1000.0)")
def a_causal_mask_for_longer_texts() -> tuple[Any, ...]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tril(torch.ones(16, 16)).bool())

        def forward(self, q: Any, k: Any) -> Any:
            att = q @ k.transpose(-2, -1)
            att = att.masked_fill(~self.mask, -1000.0)
            return att.softmax(-1)

    return Attention(), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)


# ----------------------------------------------------------------------------- not about shapes: nothing is invented


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_broken_model_is_explained_and_repaired(one: Case) -> None:
    check(one)
