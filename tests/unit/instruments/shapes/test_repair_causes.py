"""Broken models whose cause lies before the op that fails, or beside it: each is told in full, and repaired where it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from tests.unit.instruments.shapes.planted import Case, Parts, Planted, check
from torchdebug_magics.instruments.shapes.forward_table import examine_model

PLANTED = Planted()
case = PLANTED.case


@case(
    "fc",
    "linear",
    "`fc` expects 676 features, gets 169 = 13 x 13 from `conv` through `pool`: `pool` read 4 x 26 x 26 as one",
    " image without a batch",
    fix="x = x.unsqueeze(0)",
)
def batch_missing_behind_flatten_net() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            x = F.relu(self.conv(x))
            x = self.pool(x).flatten(1)
            return self.fc(x)

    return M(conv=nn.Conv2d(1, 4, 3), pool=nn.MaxPool2d(2), fc=nn.Linear(4 * 13 * 13, 10)), torch.randn(1, 28, 28)


@case(
    "2",
    "linear",
    "`2` expects 144 features, gets 288 = 2 x 4 x 6 x 6 from `0`: `flatten` merged the batch of 2 into",
    " features",
    fix="model[1] = nn.Flatten()",
)
def flatten_0() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(0), nn.Linear(144, 3)), torch.randn(2, 3, 8, 8)


@case(
    "bn",
    "batch_norm",
    "`bn` expects 16 channels, gets 10 from `fc`: its channels are last in 4 x 10 x 16",
    fix="self.bn(self.fc(x).transpose(1, 2)).transpose(1, 2)",
)
def batchnorm_btc() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            return self.out(self.bn(self.fc(x)))

    return M(fc=nn.Linear(5, 16), bn=nn.BatchNorm1d(16), out=nn.Linear(16, 2)), torch.randn(4, 10, 5)


@case("1", "prelu", "`1` expects 16 channels, gets 8 from `0`", fix="model[1] = nn.PReLU(8)")
def prelu() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(16)), torch.randn(2, 3, 8, 8)


@case(
    "",
    "grid_sample",
    "`F.grid_sample(x, grid, align_corners=False)` cannot take `x` of 4 x 3 x 8 x 8, `grid` of 1 x",
    " 8 x 8 x 2 from `loc`: dimension 0 of `grid` is 1, and 4 would fit",
    fix="F.grid_sample(x, grid.expand(x.size(0), -1, -1, -1), align_corners=False)",
)
def grid_sample_batch() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            theta = self.loc(x.mean((2, 3)))[:1].view(-1, 2, 3)
            grid = F.affine_grid(theta, (1, 3, 8, 8), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)

    return M(loc=nn.Linear(3, 6)), torch.randn(4, 3, 8, 8)


@case("", None, "mat1 and mat2 shapes cannot be multiplied (3x6 and 5x2)", fix="")
def script_module() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    return torch.jit.script(M(a=nn.Linear(4, 6), b=nn.Linear(5, 2))), torch.randn(3, 4)


@case(
    "",
    "view",
    "`self.q(x).view(b, t, self.heads, c // self.heads)` cannot split 2 x 5 x 20: `c",
    " // self.heads` is 20 // 3, with a remainder of 2; 2 and 4 divide 20",
    fix="",
)
def heads_not_dividing() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            b, t, c = x.shape
            return self.q(x).view(b, t, self.heads, c // self.heads).transpose(1, 2)

    return M(q=nn.Linear(20, 20), heads=3), torch.randn(2, 5, 20)


@case(
    "",
    "einsum",
    "`torch.einsum('bnd,dk->bnk', x, self.w)` cannot take `x` of 2 x 5 x 6, `w` of 8 x 3: the last",
    " dimension of `x` is 6, and 8 would fit",
    fix="w = nn.Parameter(torch.zeros(6, 3))",
)
def einsum_features() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            return torch.einsum("bnd,dk->bnk", x, self.w)

    return M(w=nn.Parameter(torch.zeros(8, 3))), torch.randn(2, 5, 6)


@case("2", None, "`2` expects a tensor, gets a tuple, as `1` returns it: (output, state)")
def lstm_tuple() -> tuple[Any, ...]:
    return nn.Sequential(nn.Embedding(10, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 2)), torch.randint(0, 10, (2, 5))


@case("fc", None, "`fc` expects a tensor, gets a tuple, as `rnn` returns it: (output, state)", fix="self.fc(h[0])")
def lstm_tuple2() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            h = self.rnn(x)
            return self.fc(h)

    return M(rnn=nn.GRU(8, 16, batch_first=True), fc=nn.Linear(16, 2)), torch.randn(2, 5, 8)


@case(
    "1",
    "pixel_shuffle",
    "`1` expects input of 2 x 12 x 6 x 6, gets 2 x 10 x 6 x 6 from `0`",
    fix="model[0] = nn.Conv2d(3, 12, 3, padding=1)",
)
def pixel_shuffle() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.PixelShuffle(2)), torch.randn(2, 3, 6, 6)


@case(
    "",
    "cross_entropy",
    "`cross_entropy` has scores of 2 classes (0 to 1), and `y` holds class 192: its 2 values are 0, 192",
    fix="F.cross_entropy(self.fc(x), (y > 0).long())",
)
def two_values_for_two_classes() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.fc(x), y)

    return M(fc=nn.Linear(4, 2)), torch.randn(4, 4), torch.tensor([0, 192, 192, 0])


@case("", "cross_entropy", "`cross_entropy` has scores of 2 classes (0 to 1), and `y` holds class 5", fix="fc = nn.Linear(4, 6)")
def two_values_and_what_is_ignored() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.fc(x), y)

    return M(fc=nn.Linear(4, 2)), torch.randn(4, 4), torch.tensor([0, 5, -100, 0])


@case(
    "",
    "cross_entropy",
    "`cross_entropy` has scores of 3 classes (0 to 2), and `y` holds class 255: its 3 values are 10, 20, 255",
    fix="F.cross_entropy(self.fc(x), torch.searchsorted(torch.tensor([10, 20, 255], device=y.device), y))",
)
def a_value_for_each_class() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.fc(x), y)

    return M(fc=nn.Linear(4, 3)), torch.randn(4, 4), torch.tensor([10, 255, 20, 10])


@case(
    "",
    "__eq__",
    "cannot broadcast `self.fc(x).argmax(0)` of 3",
    fix="self.fc(x).argmax(1)",
)
def maximum_over_the_batch() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return (self.fc(x).argmax(0) == y).sum()

    return M(fc=nn.Linear(4, 3)), torch.randn(8, 4), torch.randint(3, (8,))


@case(
    "",
    "add",
    "`u + s2` cannot broadcast `u` of 2 x 8 x 16 x 16 with `s2` of 2 x 16 x 8 x 8 (from `e2`): 16 and 8",
    " in the last dimension",
    fix="u + s1",
)
def unet_wrong_skip() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            s1 = self.e1(x)
            s2 = self.e2(F.max_pool2d(s1, 2))
            u = self.up(s2)
            return u + s2

    def c(i: int, o: int) -> nn.Module:
        return nn.Conv2d(i, o, 3, padding=1)

    return M(e1=c(3, 8), e2=c(8, 16), up=nn.ConvTranspose2d(16, 8, 2, 2)), torch.randn(2, 3, 16, 16)


@case(
    "",
    "reshape",
    "`img.reshape(b, c, h // p, p, w // p, p)` cannot split 2 x 3 x 30 x 30: `h // p` is 30 // 8,",
    " with a remainder of 6; 6 and 10 divide 30",
    fix="input of 32 x 32",
)
def patches_not_dividing() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, img: Any) -> Any:
            b, c, h, w = img.shape
            p = 8
            x = img.reshape(b, c, h // p, p, w // p, p)
            x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
            return self.embed(x)

    return M(embed=nn.Linear(192, 32)), torch.randn(2, 3, 30, 30)


@case(
    "",
    "add",
    "`self.tok(idx) + self.pos[:, :t]` cannot broadcast `self.tok(idx)` of 2 x 20 x 32 (from `tok`) with",
    " `self.pos[:, :t]` of 1 x 16 x 32 (from `getitem`): 20 and 16 in dimension 1: `idx` is 2 x 20,",
    " and the model has 16 positions",
    fix="idx = idx[:, :16]",
)
def gpt_beyond_block() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, idx: Any) -> Any:
            t = idx.shape[1]
            return self.tok(idx) + self.pos[:, :t]

    return M(tok=nn.Embedding(50, 32), pos=nn.Parameter(torch.zeros(1, 16, 32))), torch.randint(0, 50, (2, 20))


@case(
    "",
    "masked_fill",
    "`att.masked_fill(self.mask == 0, float('-inf'))` cannot broadcast `att` of 2 x 5 x 5 (from",
    " `matmul`) with `self.mask == 0` of 8 x 8 (from `eq`): 5 and 8 in the last dimension",
    fix="att.masked_fill((self.mask == 0)[:att.size(-2), :att.size(-1)], float('-inf'))",
)
def causal_buffer() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            att = q @ k.transpose(-2, -1) / 4
            att = att.masked_fill(self.mask == 0, float("-inf"))
            return att.softmax(-1) @ v

    return M(qkv=nn.Linear(16, 48), mask=torch.tril(torch.ones(8, 8))), torch.randn(2, 5, 16)


@case(
    "head",
    "linear",
    "`head` expects 16 features, gets 8 from `cat`: `torch.cat([h[-2], h[-1]])` made 6 x 8 of 3 x 8 and 3 x 8",
    fix="torch.cat([h[-2], h[-1]], dim=-1)",
)
def bilstm_head() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            _, (h, _) = self.rnn(x)
            return self.head(torch.cat([h[-2], h[-1]]))

    return M(rnn=nn.LSTM(6, 8, batch_first=True, bidirectional=True), head=nn.Linear(16, 2)), torch.randn(3, 5, 6)


@case(
    "",
    "index_add",
    "`messages` is 4, and 7 would fit",
    fix="lin = nn.Linear(7, 7)",
)
def gnn_edge_index() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, edges: Any) -> Any:
            src, dst = edges
            messages = self.lin(x)[src]
            out = torch.zeros_like(x)
            return out.index_add(0, dst, messages)

    return M(lin=nn.Linear(7, 4)), torch.randn(10, 7), torch.randint(0, 10, (2, 15))


@case("", None, "`src, dst = edges` unpacks 2 values, and gets a tensor of 15 x 2", fix="edges = edges.t()")
def gnn_edge_columns() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, edges: Any) -> Any:
            src, dst = edges
            return self.lin(x)[src] - self.lin(x)[dst]

    return M(lin=nn.Linear(7, 4)), torch.randn(10, 7), torch.randint(0, 10, (15, 2))


@case("dec", "linear", "`dec` expects 16 features, gets 8 from `enc`", fix="dec = nn.Linear(8, 20)")
def vae_latent() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            mu, logvar = self.enc(x).chunk(2, dim=1)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.dec(z)

    return M(enc=nn.Linear(20, 16), dec=nn.Linear(16, 20)), torch.randn(4, 20)


@case(
    "",
    "view",
    "`self.fc(z).view(-1, 32, 7, 7)` cannot reshape 4 x 1152: `self.fc(z)` of 4 x 1152 from `fc` has 4,608 elements, not",
    " divisible by 32 x 7 x 7 = 1,568",
    fix="self.fc(z).view(-1, 32, 6, 6)",
)
def vae_decoder_view() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, z: Any) -> Any:
            h = self.fc(z).view(-1, 32, 7, 7)
            return self.up(h)

    return M(fc=nn.Linear(10, 32 * 6 * 6), up=nn.ConvTranspose2d(32, 1, 4, 2, 1)), torch.randn(4, 10)


@case(
    "",
    "add",
    "`src + self.pos` cannot broadcast `src` of 2 x 16 x 25 (from `proj`) with `pos` of 1 x 25 x 16: 25",
    " and 16 in the last dimension",
    fix="src.transpose(-2, -1) + self.pos",
)
def detr_positions() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            src = self.proj(x).flatten(2)
            return src + self.pos

    return M(proj=nn.Conv2d(3, 16, 4, 4), pos=nn.Parameter(torch.zeros(1, 25, 16))), torch.randn(2, 3, 20, 20)


@case(
    "conv",
    "conv1d",
    "`conv` expects 1 channels, gets 4 from the input `wave`: 4 x 160 is read without a batch",
    fix="wave = wave.unsqueeze(1)",
)
def waveform_without_channel() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, wave: Any) -> Any:
            return self.conv(wave).mean(-1)

    return M(conv=nn.Conv1d(1, 8, 9, 4)), torch.randn(4, 160)


@case("fc", "linear", "`fc` expects 504 features, gets 488 = 8 x 61 from `c2`", fix="fc = nn.Linear(488, 5)")
def audio_off_by_one() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            x = F.relu(self.c1(x))
            x = F.relu(self.c2(x))
            return self.fc(x.flatten(1))

    return M(c1=nn.Conv1d(1, 4, 8, 4), c2=nn.Conv1d(4, 8, 8, 4), fc=nn.Linear(8 * 63, 5)), torch.randn(2, 1, 1000)


@case(
    "2.norm",
    "batch_norm",
    "`2.norm` expects 20 channels, gets 16 = 12 + 4 from `cat` in `1`",
    fix="model[2].norm = nn.BatchNorm2d(16)\nmodel[2].conv = nn.Conv2d(16, 4, 3, padding=1)",
)
def densenet_growth() -> tuple[Any, ...]:
    class L(Parts):
        def forward(self, x: Any) -> Any:
            return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)

    def layer(i: int, g: int) -> nn.Module:
        return L(norm=nn.BatchNorm2d(i), conv=nn.Conv2d(i, g, 3, padding=1))

    return nn.Sequential(layer(8, 4), layer(12, 4), layer(20, 4)), torch.randn(2, 8, 6, 6)


@case(
    "",
    "cat",
    "`torch.cat([a, b, c], 1)` cannot take `a` of 2 x 4 x 12 x 12 from `b1`, `b` of 2 x 4 x 12 x 12",
    " from `b3`, `c` of 2 x 4 x 10 x 10 from `b5`: the last dimension of `c` is 10, and 12 would fit",
)
def inception_branches() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            a, b, c = self.b1(x), self.b3(x), self.b5(x)
            return torch.cat([a, b, c], 1)

    return M(b1=nn.Conv2d(3, 4, 1), b3=nn.Conv2d(3, 4, 3, padding=1), b5=nn.Conv2d(3, 4, 5, padding=1)), torch.randn(2, 3, 12, 12)


@case(
    "",
    "binary_cross_entropy_with_logits",
    "`binary_cross_entropy_with_logits` compares",
    fix="F.binary_cross_entropy_with_logits(score, real.squeeze(-1))",
)
def gan_labels() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, real: Any) -> Any:
            score = self.net(x).view(-1)
            return F.binary_cross_entropy_with_logits(score, real)

    return M(net=nn.Linear(8, 1)), torch.randn(4, 8), torch.ones(4, 1)


@case(
    "rnn",
    None,
    "`rnn` is a LSTM, which expects 2 or 3 dimensions, gets 4: `h` is 2 x 16 x 8 x 40",
    fix="self.rnn(h.permute(0, 3, 1, 2).flatten(2))",
)
def crnn() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            h = self.conv(x)
            out, _ = self.rnn(h)
            return self.fc(out)

    return M(conv=nn.Conv2d(1, 16, 3, padding=1), rnn=nn.LSTM(16 * 8, 32, batch_first=True), fc=nn.Linear(32, 11)), torch.randn(2, 1, 8, 40)


@case(
    "",
    "cat",
    "`torch.cat([local, whole], dim=1)` cannot take `local` of 2 x 16 x 50 from `mlp`, `whole` of 2",
    " x 16 from `mlp`",
    fix="torch.cat([local, whole.unsqueeze(2).expand(-1, -1, local.size(2))], dim=1)",
)
def pointnet_global() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, points: Any) -> Any:
            local = self.mlp(points)
            whole = local.max(dim=2).values
            return self.seg(torch.cat([local, whole], dim=1))

    return M(mlp=nn.Conv1d(3, 16, 1), seg=nn.Conv1d(32, 4, 1)), torch.randn(2, 3, 50)


@case(
    "dec.layers.0.self_attn",
    "multi_head_attention_forward",
    "`dec.layers.0.self_attn` expects attn_mask of 6 x 6, gets 9 x 9 from `full`, as query is 2 x 6",
    " x 16",
    fix="mask = mask[:6, :6]",
)
def tgt_mask() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, src: Any, tgt: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(src.size(1))
            return self.dec(tgt, src, tgt_mask=mask)

    return (
        M(dec=nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1)),
        torch.randn(2, 9, 16),
        torch.randn(2, 6, 16),
    )


@case(
    "",
    "cat",
    "`torch.cat([x, t], dim=1)` cannot take `x` of 4 x 5, `t` of 4: 4 x 1 would fit",
    fix="torch.cat([x, t.unsqueeze(-1)], dim=1)",
)
def time_cat() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any, t: Any) -> Any:
            return self.fc(torch.cat([x, t], dim=1))

    return M(fc=nn.Linear(6, 5)), torch.randn(4, 5), torch.rand(4)


@case(
    "att",
    "multi_head_attention_forward",
    "`att` expects query of 3 x 4 x 16, gets 1 x 4 x 16, as key is 3 x 9 x 16",
    fix="self.att(self.latents.expand(x.size(0), -1, -1), x, x)",
)
def latents_not_expanded() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            return self.att(self.latents, x, x)[0]

    return M(latents=nn.Parameter(torch.zeros(1, 4, 16)), att=nn.MultiheadAttention(16, 2, batch_first=True)), torch.randn(3, 9, 16)


@case("fc", "linear", "`fc` has float32 weights, gets `torch.fft.rfft(x)` in complex64", fix="")
def fft() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(torch.fft.rfft(x))

    return M(fc=nn.Linear(9, 4)), torch.randn(3, 16)


@case("1", "group_norm", "`1` expects 8 channels, gets 10 from `0`", fix="model[1] = nn.GroupNorm(2, 10)")
def groups() -> tuple[Any, ...]:
    return nn.Sequential(nn.Conv2d(3, 10, 1), nn.GroupNorm(4, 8)), torch.randn(2, 3, 4, 4)


@case("cell", "gru_cell", "`cell` expects a hidden state of 3 x 12, gets 3 x 16 from `zeros`", fix="cell = nn.GRUCell(6, 16)")
def cell_loop() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, xs: Any) -> Any:
            h = torch.zeros(xs.size(0), 16)
            for t in range(xs.size(1)):
                h = self.cell(xs[:, t], h)
            return h

    return M(cell=nn.GRUCell(6, 12)), torch.randn(3, 5, 6)


@case(
    "tokens",
    "linear",
    "`tokens` expects 9 features, gets 16 from the input `x`, the last dimension of 2 x 9 x 16",
    fix="self.tokens(y.transpose(1, 2)).transpose(1, 2)",
)
def mixer() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            y = self.tokens(y)
            return x + y

    return M(norm=nn.LayerNorm(16), tokens=nn.Linear(9, 9)), torch.randn(2, 9, 16)


@case(
    "att",
    "multi_head_attention_forward",
    "`att` expects 16 features (embed_dim) in its query, gets 24 from `q`",
    fix="q = nn.Linear(8, 16)",
)
def mha_by_name() -> tuple[Any, ...]:
    class M(Parts):
        def forward(self, q: Any, m: Any) -> Any:
            return self.att(value=m, key=m, query=self.q(q))[0]

    return M(q=nn.Linear(8, 24), att=nn.MultiheadAttention(16, 4, batch_first=True)), torch.randn(2, 5, 8), torch.randn(2, 7, 16)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(6, 4, 3)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(6)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.GroupNorm(2, 6)),
    ],
    ids=["conv", "batch norm", "group norm"],
)
def test_channels_of_a_convolution_are_not_turned_for_a_size_that_happens_to_fit(model: nn.Module) -> None:
    failure = examine_model(model, torch.randn(2, 3, 8, 8)).report.failure  # 6 x 6 pictures, where 6 channels are wanted
    assert failure is not None
    assert "stand last" not in failure.explanation
    assert failure.fixes[0].verified
    assert not [fix.code for fix in failure.fixes if "permute" in fix.code or "transpose" in fix.code]


@pytest.mark.parametrize("one", PLANTED.cases, ids=lambda one: one.name)
def test_a_broken_model_is_explained_and_repaired(one: Case) -> None:
    check(one)
