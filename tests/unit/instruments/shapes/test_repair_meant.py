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


@case("red", "linear", "`red` expects 32 features, gets 24 = 8 + 8 + 8 from `cat`", fix="red = nn.Linear(24, 16)")
def quarters_joined_behind_the_pixels() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            x = x.permute(0, 2, 3, 1)
            x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2]], -1)
            return self.red(x)

    return Net(red=nn.Linear(32, 16)), torch.randn(2, 8, 6, 6)


@case("", "add", "4 and 8 in dimension -3", fix="")
def slopes_for_more_heads() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            steps = torch.arange(q.size(2))
            bias = self.slopes.view(-1, 1, 1) * (steps[None] - steps[:, None])
            return (q @ k.transpose(-2, -1) + bias).softmax(-1)

    return Net(slopes=torch.rand(8)), torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5, 6)


@case("", "stack", "equal shapes", fix="experts[2] = nn.Linear(6, 4)")
def one_expert_narrower_than_the_others() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return torch.stack([expert(x) for expert in self.experts], 1).mean(1)

    return Net(experts=nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 3)])), torch.randn(3, 6)


@case("", "einsum", "gives `h`, a letter of none of its tensors", fix="")
def heads_that_no_tensor_has() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.einsum("bid,bjd->bhij", q, k)

    return Net(), torch.randn(2, 5, 8), torch.randn(2, 5, 8)


@case("", "index_put_", "`out` in float16", fix="out.index_put_((at,), self.fc(x).half())")
def a_cast_of_what_is_written_to() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, at: Any) -> Any:
            out = torch.zeros(10, 4, dtype=torch.float16)
            out.index_put_((at,), self.fc(x))
            return out

    return Net(fc=nn.Linear(6, 4)), torch.randn(3, 6), torch.tensor([1, 2, 3])


@case(
    "",
    "__setitem__",
    "`out[:, :x.size(1)]` is a place of 3 x 5 x 8 in `out` of 3 x 10 x 8",
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


@case("", "__setitem__", "is a place of 2 x 2 x 8 in `cache` of 2 x 16 x 8, and gets `x` of 2 x 4 x 8: 2 and 4 in dimension 1", fix="")
def a_cache_that_is_full() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, at: int) -> Any:
            self.cache[:, at : at + x.size(1)] = x
            return self.cache.sum(1)

    return Net(cache=torch.zeros(2, 16, 8)), torch.randn(2, 4, 8), 14


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


@case("", "split", "splits 3 + 2 = 5 off dimension 1, and `self.fc(x)` of 5 x 4 from `fc` has 4 there", fix="fc = nn.Linear(6, 5)")
def parts_larger_than_the_whole() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            first, _ = self.fc(x).split([3, 2], -1)
            return first

    return Net(fc=nn.Linear(6, 4)), torch.randn(5, 6)


@case("", "topk", "asks for 5 of dimension 1, and `x` of 5 x 4 has 4 there", fix="")
def more_than_there_are() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return x.topk(5).values

    return Net(), torch.randn(5, 4)


@case("", "repeat", "`x.repeat(3, 1)` says how often for 2 dimensions, and `x` of 2 x 3 x 5 has 3", fix="")
def repeated_along_too_few_dimensions() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return x.repeat(3, 1)

    return Net(), torch.randn(2, 3, 5)


@case("", "linear", "gives 7 features, as its weight is 7 x 6, and adds `b` of 6", fix="b = nn.Parameter(torch.zeros(7))")
def a_bias_as_long_as_the_input() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.linear(x, self.w, self.b)

    return Net(w=nn.Parameter(torch.randn(7, 6)), b=nn.Parameter(torch.zeros(6))), torch.randn(4, 6)


@case("", "baddbmm", "adds `b` of 1 x 5 x 6 to a product of 4 x 5 x 7", fix="b = nn.Parameter(torch.zeros(1, 5, 7))")
def a_term_beside_a_product() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return torch.baddbmm(self.b, x, y)

    return Net(b=nn.Parameter(torch.zeros(1, 5, 6))), torch.randn(4, 5, 6), torch.randn(4, 6, 7)


@case("", "conv2d", "`conv2d` takes weights of 4 dimensions", "`w` is 8 x 3 x 3", fix="")
def a_kernel_without_a_dimension() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return F.conv2d(x, self.w, padding=1)

    return Net(w=nn.Parameter(torch.randn(8, 3, 3))), torch.randn(4, 3, 9, 9)


@case("", "sub", "8 and 3 in the last dimension", fix="(x - self.mean[:, None, None]) / self.std[:, None, None]")
def a_mean_for_each_channel() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.conv((x - self.mean) / self.std)

    return Net(mean=torch.rand(3), std=torch.rand(3), conv=nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)


@case(
    "",
    "matmul",
    "their batches 3 x 4 and 3 x 2 do not fit",
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


@case("", "__getitem__", "asks for position 9 of dimension 1, which has 9", fix="x[torch.arange(x.size(0)), x.size(1) - 1]")
def a_last_position_that_is_computed() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return x[torch.arange(x.size(0)), x.size(1)]

    return Net(), torch.randn(4, 9, 3)


@case("", "cross_entropy", "as many columns in a target of probabilities, gets 6 x 5", fix="fc = nn.Linear(8, 5)")
def rows_of_probabilities_for_more_classes() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.fc(x), y)

    return Net(fc=nn.Linear(8, 4)), torch.randn(6, 8), torch.rand(6, 5)


@case("", "gather", "`gather` along dimension 1: `self.fc(x)` of 4 from `fc` has dimensions -1 to 0 alone", fix="")
def a_single_sample_to_gather_from() -> tuple[Any, ...]:
    class Net(Parts):
        def forward(self, x: Any) -> Any:
            return self.fc(x).gather(1, self.at)

    return Net(fc=nn.Linear(10, 4), at=torch.zeros(1, 1, dtype=torch.long)), torch.randn(10)


@case("emb", "embedding", "gets index 11", ": `argmax` tells one of 12 from `fc`", fix="emb = nn.Embedding(12, 8)")
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
