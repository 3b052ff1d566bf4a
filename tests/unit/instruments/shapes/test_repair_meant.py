"""What comes through is not always what was meant: edits that only make sizes fit are not offered where a better one is known."""

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
    "`norm` expects 16 features, gets 8 from `conv`",
    fix="self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
)
def a_picture_that_is_turned_behind_its_norm() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            short = x
            x = self.conv(x)
            x = self.norm(x)
            x = self.out(x.permute(0, 2, 3, 1))
            return short + x.permute(0, 3, 1, 2)

    net = Net(conv=nn.Conv2d(16, 16, 3, padding=1), norm=nn.LayerNorm(16), out=nn.Linear(16, 16))
    return net, torch.randn(2, 16, 8, 8)


@case("", "add", "4 and 8 in dimension -3", fix="")
def slopes_for_more_heads() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            steps = torch.arange(q.size(2))
            bias = self.slopes.view(-1, 1, 1) * (steps[None] - steps[:, None])
            return (q @ k.transpose(-2, -1) + bias).softmax(-1)

    return Net(slopes=torch.rand(8)), torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5, 6)


@case(
    "",
    "stack",
    "`torch.stack([expert(x) for expert in self.experts], 1)` cannot take `[expert(x) for expert in",
    " self.experts]` of 3 x 4 from `experts.0`, the tensor of 3 x 4 from `experts.1`, the tensor of",
    " 3 x 3 from `experts.2`: the last dimension of the tensor is 3, and 4 would fit",
    fix="experts[2] = nn.Linear(6, 4)",
)
def one_expert_narrower_than_the_others() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return torch.stack([expert(x) for expert in self.experts], 1).mean(1)

    return Net(experts=nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)])), torch.randn(3, 6)


@case(
    "",
    "__setitem__",
    "`out[:, :x.size(1)]` selects 3 x 5 x 8 of `out` of 3 x 10 x 8",
    "3 x 5 x 7 from `fc`: 8 and 7 in the last dimension",
    fix="out = torch.zeros(x.size(0), 10, 7)",
)
def a_place_wider_than_what_is_put_there() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            out = torch.zeros(x.size(0), 10, 8)
            out[:, : x.size(1)] = self.fc(x)
            return out

    return Net(fc=nn.Linear(6, 7)), torch.randn(3, 5, 6)


@case("rnn", None, "a hidden state of 1 x 3 x 16", "gets 2 x 3 x 16", fix="enc = nn.LSTM(8, 16, batch_first=True)")
def the_states_of_both_directions() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            _, state = self.enc(x)
            return self.rnn(y, state)[0]

    return (
        Net(enc=nn.LSTM(8, 16, batch_first=True, bidirectional=True), rnn=nn.LSTM(8, 16, batch_first=True)),
        torch.randn(3, 7, 8),
        torch.randn(3, 5, 8),
    )


@case("", "split", "the last dimension of `self.fc(x)` is 4, and 5 would fit", fix="fc = nn.Linear(6, 5)")
def parts_larger_than_the_whole() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            first, _ = self.fc(x).split([3, 2], -1)
            return first

    return Net(fc=nn.Linear(6, 4)), torch.randn(5, 6)


@case("", "repeat", "repeat dims", "`x` of 2 x 3 x 5", fix="")
def repeated_along_too_few_dimensions() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return x.repeat(3, 1)

    return Net(), torch.randn(2, 3, 5)


@case("", "sub", "8 and 3 in the last dimension", fix="(x - self.mean[:, None, None]) / self.std[:, None, None]")
def a_mean_for_each_channel() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.conv((x - self.mean) / self.std)

    return Net(mean=torch.rand(3), std=torch.rand(3), conv=nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)


@case(
    "",
    "matmul",
    "`q @ k.transpose(-1, -2)` cannot take `q` of 3 x 4 x 5 x 8, `k.transpose(-1, -2)` of 3 x 2 x 8",
    " x 5 from `k`: dimension 1 of `k.transpose(-1, -2)` is 2, and 4 would fit",
    fix="q @ k.transpose(-1, -2).repeat_interleave(2, 1)\natt.softmax(-1) @ v.repeat_interleave(2, 1)",
)
def fewer_heads_of_keys_by_hand() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            q = self.q(x).view(3, 5, 4, 8).transpose(1, 2)
            k = self.k(x).view(3, 5, 2, 8).transpose(1, 2)
            v = self.v(x).view(3, 5, 2, 8).transpose(1, 2)
            att = q @ k.transpose(-1, -2)
            return att.softmax(-1) @ v

    return Net(q=nn.Linear(32, 32), k=nn.Linear(32, 16), v=nn.Linear(32, 16)), torch.randn(3, 5, 32)


@case("", "add", "2 and 10 in dimension 0", fix="x + self.pos[:x.size(1)].transpose(0, 1)")
def a_table_for_steps_before_the_batch() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            x = x + self.pos[: x.size(1)]
            return self.fc(x)

    return Net(pos=torch.zeros(32, 1, 8), fc=nn.Linear(8, 2)), torch.randn(2, 10, 8)


@case("", "__getitem__", "selects position 9 of dimension 1, which has 9", fix="x[torch.arange(x.size(0)), x.size(1) - 1]")
def a_last_position_that_is_computed() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return x[torch.arange(x.size(0)), x.size(1)]

    return Net(), torch.randn(4, 9, 3)


@case("", "gather", "`gather` uses dimension 1, which does not exist: `self.fc(x)` of 4 from `fc` has dimensions -1 to 0", fix="")
def a_single_sample_to_gather_from() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(x).gather(1, self.at)

    return Net(fc=nn.Linear(10, 4), at=torch.zeros(1, 1, dtype=torch.long)), torch.randn(10)


@case("emb", "embedding", "gets index 11", ": `argmax` returns one of 12 from `fc`", fix="emb = nn.Embedding(12, 8)")
def classes_that_are_looked_up() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.emb(self.fc(x).argmax(-1))

    net = Net(fc=nn.Linear(12, 12, bias=False), emb=nn.Embedding(4, 8))
    nn.init.eye_(net.fc.weight)
    return net, torch.eye(12)


@case("emb", "embedding", "has 10 rows (0 to 9), gets index 10 at `at`[10]", fix="at = at.clamp(max=9)")
def numbers_put_into_bins() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            at = (x * 10).floor().long()
            return self.emb(at)

    return Net(emb=nn.Embedding(10, 4)), torch.linspace(0, 1, 11)


@case("", "masked_scatter", "Number of elements of source < number of ones in mask", "`e` of 2 x 3 x 8", fix="")
def fewer_pictures_than_places_for_them() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, ids: Any, image: Any) -> Any:
            e = self.emb(ids)
            return e.masked_scatter((ids == 3).unsqueeze(-1).expand_as(e), self.proj(image))

    return Net(emb=nn.Embedding(10, 8), proj=nn.Linear(4, 8)), torch.tensor([[3, 3, 1], [3, 2, 2]]), torch.randn(2, 4)


@case(
    "",
    "cdist",
    "`torch.cdist(self.fc(x), self.book)` cannot take `self.fc(x)` of 2 x 4 from `fc`, `book` of 10",
    " x 8: the last dimension of `self.fc(x)` is 4, and 8 would fit",
    fix="fc = nn.Linear(6, 8)",
)
def distances_between_rows_of_two_widths() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return torch.cdist(self.fc(x), self.book)

    return Net(fc=nn.Linear(6, 4), book=torch.randn(10, 8)), torch.randn(2, 6)


@case(
    "",
    "stft",
    "`torch.stft(wave, 64, return_complex=True)` cannot take `wave` of 2 x 1 x 999: 2 x 999 would",
    " fit",
    fix="torch.stft(wave.squeeze(1), 64, return_complex=True)",
)
def a_wave_with_a_channel() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, wave: Any) -> Any:
            return torch.stft(wave, 64, return_complex=True).abs()

    return Net(), torch.randn(2, 1, 999)


@case(
    "",
    "istft",
    "`istft`: istft requires a complex-valued input tensor matching the output from stft with",
    " return_complex=True. (it gets `spectrum` of 2 x 33 x 40)",
)
def a_magnitude_to_be_turned_back() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, spectrum: Any) -> Any:
            return torch.istft(spectrum, 64)

    return Net(), torch.rand(2, 33, 40)


@case("net.0", "conv2d", "float32 weights, gets an input in complex64", fix="self.net(spectrum.unsqueeze(1).abs())")
def a_spectrum_with_its_phase() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, wave: Any) -> Any:
            spectrum = torch.stft(wave, 64, return_complex=True)
            return self.net(spectrum.unsqueeze(1))

    return Net(net=nn.Sequential(nn.Conv2d(1, 4, 3))), torch.randn(2, 999)


@case(
    "",
    "ctc_loss",
    "`scores` of 3 x 20 x 12 from `fc`, `y` of 3 x 5, `a` of 3, `b` of 3: dimension 1 of `scores` is 20, and 3 would fit",
    fix="F.ctc_loss(scores.transpose(0, 1), y, a, b)",
)
def scores_with_the_batch_first() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, y: Any, a: Any, b: Any) -> Any:
            scores = self.fc(x).log_softmax(-1)
            return F.ctc_loss(scores, y, a, b)

    return Net(fc=nn.Linear(8, 12)), torch.randn(3, 20, 8), torch.ones(3, 5).long(), torch.full((3,), 20), torch.full((3,), 5)


@case(
    "",
    "_sparse_mm",
    "`torch.sparse.mm(self.near, self.fc(x))` cannot take `near` of 6 x 6, `self.fc(x)` of 5 x 8",
    " from `fc`: dimension 0 of `self.fc(x)` is 5, and 6 would fit",
)
def a_graph_of_more_nodes() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return torch.sparse.mm(self.near, self.fc(x))

    return Net(fc=nn.Linear(8, 8), near=torch.eye(6).to_sparse()), torch.randn(5, 8)


@case("", None, "`a, b = self.fc(x)` unpacks 2 values: too many values to unpack", fix="")
def one_tensor_for_two_names() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            a, b = self.fc(x)
            return a + b

    return Net(fc=nn.Linear(6, 4)), torch.randn(5, 6)


@case("", "mse_loss", "of 4 x 49 from `net.2` with `x` of 4 x 1 x 7 x 7", fix="F.mse_loss(y, x.flatten(1))")
def a_picture_beside_its_rows() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            y = self.net(x)
            return F.mse_loss(y, x)

    return Net(net=nn.Sequential(nn.Flatten(), nn.Linear(49, 5), nn.Linear(5, 49))), torch.randn(4, 1, 7, 7)


@case("fc", "linear", "gets 1024 = 16 x 8 x 8 from `conv`: `x.view(x.size(0), -1)` made 2 x 1024 of 2 x 16 x 8 x 8", fix="x.mean((2, 3))")
def channels_that_were_to_be_pooled() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            x = self.conv(x)
            x = x.view(x.size(0), -1)
            return self.fc(x)

    return Net(conv=nn.Conv2d(3, 16, 3, padding=1), fc=nn.Linear(16, 4)), torch.randn(2, 3, 8, 8)


@case("", "mul", "6 and 5 in the last dimension", fix="(h * m.unsqueeze(-1)).sum(1) / m.sum(1).unsqueeze(-1)")
def a_mean_of_the_steps_that_count() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, m: Any) -> Any:
            h = self.fc(x)
            return (h * m).sum(1) / m.sum(1)

    return Net(fc=nn.Linear(8, 6)), torch.randn(2, 5, 8), torch.ones(2, 5)


@case("", "__getitem__", "selects position 2 of dimension 0, which has 2", fix="h[-1]")
def the_layer_behind_the_last() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            _, h = self.rnn(x)
            return h[2]

    return Net(rnn=nn.GRU(4, 8, 2, batch_first=True)), torch.randn(3, 7, 4)


@case("emb", "add", "10 and 8 in dimension 1; `kinds` is 2 x 8 beside `ids` of 2 x 10", fix="")
def kinds_of_fewer_words() -> tuple[Any, ...]:
    class Both(Parts):
        def forward(self, ids: Any, kinds: Any) -> Any:
            return self.words(ids) + self.kinds(kinds)

    class Net(Parts):
        def forward(self, ids: Any, kinds: Any) -> Any:
            return self.emb(ids, kinds)

    emb = Both(words=nn.Embedding(50, 4), kinds=nn.Embedding(2, 4))
    return Net(emb=emb), torch.zeros(2, 10).long(), torch.zeros(2, 8).long()


@case("", "__rsub__", "subtracts from a mask of bool: `~` inverts it", fix="~(x > 0)")
def one_less_a_comparison() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(x) * (1 - (x > 0))

    return Net(fc=nn.Linear(4, 4)), torch.randn(2, 4)


@case("", "index_add_", "`self.fc(x)` in float32", fix="out.index_add_(0, at, self.fc(x).double())")
def rows_of_another_dtype_beside_an_index() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, at: Any) -> Any:
            out = torch.zeros(4, 3, dtype=torch.float64)
            return out.index_add_(0, at, self.fc(x))

    return Net(fc=nn.Linear(4, 3)), torch.randn(5, 4), torch.zeros(5).long()


@case(
    "",
    "conv2d",
    "`F.conv2d(x, self.k, padding=1)` cannot take `x` of 1 x 3 x 8 x 8, `k` of 1 x 1 x 3 x 3:",
    " dimension 1 of `k` is 1, and 3 would fit",
    fix="F.conv2d(x, self.k.expand(-1, x.size(1), -1, -1), padding=1)",
)
def one_kernel_for_three_channels() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.conv2d(x, self.k, padding=1)

    return Net(k=torch.randn(1, 1, 3, 3)), torch.randn(1, 3, 8, 8)


@case(
    "",
    "conv2d",
    "`F.conv2d(x, self.k, groups=3)` cannot take `x` of 2 x 3 x 8 x 8, `k` of 1 x 1 x 3 x 3:",
    " dimension 0 of `k` is 1, and 3 would fit",
    fix="F.conv2d(x, self.k.expand(x.size(1), -1, -1, -1), groups=3)",
)
def one_filter_for_three_groups() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.conv2d(x, self.k, groups=3)

    return Net(k=torch.randn(1, 1, 3, 3)), torch.randn(2, 3, 8, 8)


@case("fc", "linear", "`fc` expects 6 features, gets 4", fix="self.fc(x)")
def turned_for_nothing() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(x.T)

    return Net(fc=nn.Linear(6, 2)), torch.randn(4, 6)


@case(
    "",
    "cat",
    "`torch.cat([F.interpolate(x, scale_factor=2), skip], 1)` cannot take `F.interpolate(x,",
    " scale_factor=2)` of 1 x 4 x 4 x 4 from the input `x`, `skip` of 1 x 8 x 8 x 8 from the input",
    " `skips[0]`: the last dimension of `skip` is 8, and 4 would fit",
)
def skips_in_the_wrong_order() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, skips: Any) -> Any:
            for skip in skips:
                x = self.out(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
            return x

    return Net(out=nn.Conv2d(12, 4, 3, padding=1)), torch.randn(1, 4, 2, 2), [torch.randn(1, 8, 8, 8), torch.randn(1, 8, 4, 4)]


@case("", "add_", "an expanded tensor whose rows share memory", fix="m = m.clone() + x")
def rows_that_share_their_memory() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            m = self.m.expand(3, 4)
            m += x
            return m

    return Net(m=torch.zeros(1, 4)), torch.randn(3, 4)


@case("", "transpose", "`squeeze` removed the batch dimension", fix="self.conv(x).squeeze(2)")
def a_batch_of_one_before_it_is_turned() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            h = self.conv(x).squeeze()
            h = h.transpose(1, 2)
            return self.fc(h)

    return Net(conv=nn.Conv2d(1, 4, (5, 3)), fc=nn.Linear(4, 2)), torch.randn(1, 1, 5, 10)


@case("", "glu", "the last dimension of `self.fc(x)` is 7, and 8 would fit", fix="fc = nn.Linear(4, 8)")
def an_odd_number_to_be_halved() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.glu(self.fc(x), -1)

    return Net(fc=nn.Linear(4, 7)), torch.randn(2, 4)


@case(
    "",
    "grid_sample",
    "`F.grid_sample(x, self.at(x), align_corners=False)` cannot take `x` of 2 x 3 x 8 x 8,",
    " `self.at(x)` of 2 x 2 x 8 x 8 from `at`: the last dimension of `self.at(x)` is 8, and 2 would",
    " fit",
    fix="F.grid_sample(x, self.at(x).permute(0, 2, 3, 1), align_corners=False)",
)
def a_grid_with_its_coordinates_first() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.grid_sample(x, self.at(x), align_corners=False)

    return Net(at=nn.Conv2d(3, 2, 3, padding=1)), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_what_was_meant_is_offered_first(one: Case) -> None:
    check(one)


def test_an_index_for_each_row_is_not_taken_for_one_for_all_rows() -> None:
    class Net(Parts):
        def forward(self, x: Any, at: Any) -> Any:
            return self.fc(x).gather(1, at)

    _, failure = broken(lambda: (Net(fc=nn.Linear(10, 4)), torch.randn(5, 10), torch.randint(0, 4, (5,))))
    assert [fix.code for fix in failure.fixes] == ["self.fc(x).gather(1, at.unsqueeze(-1))"]


def test_a_fix_is_tried_for_real_where_a_later_op_looks_at_values() -> None:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.emb((self.fc(x) + 9).long())

    _, failure = broken(lambda: (Net(fc=nn.Linear(6, 3), emb=nn.Embedding(5, 2)), torch.randn(4, 8)))
    assert failure.module == "fc"
    assert not [fix for fix in failure.fixes if fix.verified and "Embedding" not in fix.code]
