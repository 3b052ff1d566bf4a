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
    "2",
    "linear",
    "`2` expects 128 features",
    "gets 16 from `0`, the last dimension of 4 x 8 x 16 x 16",
    fix="model[2] = nn.Linear(2048, 5)\nmodel.insert(2, nn.Flatten())",
)
def sequential_without_flatten() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Linear(128, 5)), torch.randn(4, 3, 16, 16)


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


@case("enc.0", "linear", "`enc.0` has float16 weights, gets `x` in float32", fix="x = x.half()")
def half_weights() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).half()

        def forward(self, x: Any) -> Any:
            return self.enc(x)

    return Net(), torch.randn(3, 4)


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


@case("", "mse_loss", "of 3 x 5 from `fc`", "of 3 x 2", fix="fc = nn.Linear(4, 2)")
def regression_width() -> tuple[Any, ...]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)

        def forward(self, x: Any, y: Any) -> Any:
            return F.mse_loss(self.fc(x), y)

    return Net(), torch.randn(3, 4), torch.randn(3, 2)


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


# ----------------------------------------------------------------------------- not about shapes: nothing is invented


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_broken_model_is_explained_and_repaired(one: Case) -> None:
    check(one)
