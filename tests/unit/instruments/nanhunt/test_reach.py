"""Of several bad elements, those that reached the sink are marked and no others, whatever op stands between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tests.unit.instruments.nanhunt.test_walk import births

nan, inf = math.nan, math.inf


def ones(shape: tuple[int, ...], *bad: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    made = torch.linspace(0.5, 1.5, math.prod(shape)).reshape(shape)
    for index in bad:
        made[index] = value
    return made


USED: dict[str, tuple[Any, list[torch.Tensor], str, list[list[int]] | None]] = {
    "softmax row": (lambda x: x.log().neg().softmax(1)[1], [ones((4, 3), (0, 1), (1, 2))], "log", [[1, 2]]),
    "linear row": (lambda x: nn.Linear(3, 3)(x.log())[3].sum(), [ones((4, 3), (0, 1), (3, 2))], "log", [[3, 2]]),
    "mm right col": (lambda x: (torch.ones(3, 3) @ x.log())[:, 2].sum(), [ones((3, 3), (0, 1), (0, 2))], "log", [[0, 2]]),
    "bmm": (lambda x: torch.bmm(x.log(), torch.ones(2, 3, 3))[1].sum(), [ones((2, 3, 3), (0, 1, 1), (1, 2, 2))], "log", [[1, 2, 2]]),
    "layernorm": (lambda x: nn.LayerNorm(3)(x.log())[1].sum(), [ones((2, 3), (0, 1), (1, 2))], "log", [[1, 2]]),
    "lstm batch second": (
        lambda x: nn.LSTM(3, 4)(x.log())[0][:, 1].sum(),
        [ones((5, 2, 3), (0, 0, 1), (1, 1, 2), value=-1.0)],
        "log",
        [[1, 1, 2]],
    ),
    "sort": (lambda x: x.log().sort(1)[0][1, 0], [ones((4, 3), (0, 0), (1, 2))], "log", [[1, 2]]),
    "split": (lambda x: x.log().split(2)[1].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "unbind": (lambda x: x.log().unbind(1)[2].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "chunk": (lambda x: x.log().chunk(2)[0].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[0, 0]]),
    "index": (lambda x: x.log()[torch.tensor([1, 3])].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "gather": (lambda x: x.log().gather(1, torch.tensor([[0], [1], [1], [2]]))[1:].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "ellipsis": (lambda x: x.log()[..., -1].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "transpose row": (lambda x: x.log().t()[2].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "where": (
        lambda x: torch.where(torch.tensor([[True], [False], [True], [False]]), x.log(), x).sum(),
        [ones((4, 3), (0, 1), (1, 2))],
        "log",
        [[0, 1]],
    ),
    "broadcast col": (lambda x: (torch.ones(4, 3) * x.log())[2].sum(), [ones((4, 1), (0,), (2,))], "log", [[2, 0]]),
    "nll target only": (lambda x: F.nll_loss(x.log(), torch.tensor([0, 1, 1, 2])), [ones((4, 3), (1, 0), (3, 2))], "log", [[3, 2]]),
    "mse none": (
        lambda x: F.mse_loss(x.log(), torch.ones(4, 3), reduction="none")[1].mean(),
        [ones((4, 3), (1, 0), (3, 2))],
        "log",
        [[1, 0]],
    ),
    "embedding": (lambda x: F.embedding(torch.tensor([1, 3]), x.log()).sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "cumsum": (lambda x: x.log().cumsum(0)[1].sum(), [ones((4, 3), (0, 0), (3, 2))], "log", [[0, 0]]),
    "logsumexp": (lambda x: x.log().neg().logsumexp(1)[3], [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "norm": (lambda x: x.log().norm(dim=1)[3], [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "var": (lambda x: x.log().var(1)[3], [ones((4, 3), (0, 0), (3, 2))], "log", [[3, 2]]),
    "einsum": (
        lambda x: torch.einsum("bij,jk->bik", x.log(), torch.ones(3, 2))[1].sum(),
        [ones((2, 4, 3), (0, 0, 0), (1, 1, 2))],
        "log",
        [[1, 1, 2]],
    ),
    "pixel_shuffle": (
        lambda x: F.pixel_shuffle(x.log(), 2)[1].sum(),
        [ones((2, 4, 2, 2), (0, 0, 0, 0), (1, 1, 1, 1))],
        "log",
        [[1, 1, 1, 1]],
    ),
    "interp": (lambda x: F.interpolate(x.log(), scale_factor=2)[1].sum(), [ones((2, 1, 4), (0, 0, 0), (1, 0, 2))], "log", [[1, 0, 2]]),
    "stack other": (lambda x, y: torch.stack([x.log(), (y - 9).sqrt()])[1].sum(), [ones((2,), (0,)), ones((2,))], "sqrt", [[0], [1]]),
    "masked_select": (
        lambda x: x.log().masked_select(torch.tensor([[False], [True], [True], [True]])).sum(),
        [ones((4, 3), (0, 0), (3, 2))],
        "log",
        [[3, 2]],
    ),
    "bmm birth": (
        lambda x: torch.bmm(x, x)[1].sum(),
        [torch.stack([torch.ones(2, 2), torch.full((2, 2), 3e30)])],
        "bmm",
        [[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]],
    ),
    "two different births, one used": (
        lambda x: torch.addmm((x - 9).sqrt(), x.log(), torch.ones(3, 3))[1].sum(),
        [ones((3, 3), (2, 0))],
        "sqrt",
        [[1, 0], [1, 1], [1, 2]],
    ),
    "inplace row": (lambda x: (h := x.clone(), h[1].log_(), h[2].log_(), h[2].sum())[-1], [ones((3, 3), (1, 0), (2, 2))], "log_", [[2]]),
    "setitem": (
        lambda x: (h := torch.zeros(3, 3), h.__setitem__(slice(1, 3), x[1:].log()), h[2].sum())[-1],
        [ones((3, 3), (1, 0), (2, 2))],
        "log",
        [[1, 2]],
    ),
    "clamp inside": (lambda x: x.log().clamp(min=-5)[0].sum() + x.log()[1].sum(), [ones((3, 3), (0, 0), (1, 2))], "log", [[1, 2]]),
    "aminmax": (lambda x: x.log().aminmax(dim=1).min[2], [ones((4, 3), (0, 1), (2, 1))], "log", [[2, 1]]),
    "kl": (
        lambda x: F.kl_div(x.log(), torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.5]]), reduction="none")[1].sum(),
        [ones((2, 3), (0, 2), (1, 2))],
        "log",
        [[1, 2]],
    ),
    "group_norm": (lambda x: F.group_norm(x.log(), 1)[1].sum(), [ones((2, 4, 3), (0, 0, 0), (1, 1, 2))], "log", [[1, 1, 2]]),
    "ctc": (
        lambda x: F.ctc_loss(
            x.log().sub(0).log_softmax(2), torch.tensor([[1], [2]]), torch.tensor([4, 4]), torch.tensor([1, 1]), reduction="none"
        )[1],
        [ones((4, 2, 3), (0, 0, 0), (1, 1, 2), value=-1)],
        "log",
        [[1, 1, 2]],
    ),
}


@pytest.mark.parametrize("name", USED)
@pytest.mark.filterwarnings("ignore")
def test_only_what_was_used_is_marked(name: str) -> None:
    work, inputs, op, marked = USED[name]
    (birth,) = births(work, *inputs)
    assert birth.op.name == op
    assert marked is None or birth.mask.nonzero().tolist() == marked


def overwritten_later(x: torch.Tensor) -> torch.Tensor:
    h = x.log()
    y = h * 2
    h.zero_()
    return y


def overwritten_below_a_view(x: torch.Tensor) -> torch.Tensor:
    h = x.log()
    y = h[:] * 2
    h.zero_()
    return y


def overwritten_by_nan(x: torch.Tensor) -> torch.Tensor:
    h = x.log()
    y = h * 2
    h.fill_(nan)
    return y


@pytest.mark.parametrize("work", [overwritten_later, overwritten_below_a_view, overwritten_by_nan])
def test_an_input_that_was_overwritten_since_is_what_it_was(work: Any) -> None:
    (birth,) = births(work, torch.tensor([1.0, 0.0, 0.0]))
    assert birth.op.name == "log"
    assert birth.mask.tolist() == [False, True, True]


def test_an_infinity_beside_the_nan_that_reached_the_sink_is_marked_too() -> None:
    (birth,) = births(lambda x: (x.log() * 2)[:3].sum(), torch.tensor([-1.0, 0.0, 1.0, -1.0]))
    assert birth.mask.tolist() == [True, True, False, False]


def test_a_sparse_operand_is_followed_not_blamed() -> None:
    (birth,) = births(lambda x: torch.sparse.mm(x.log().to_sparse(), torch.ones(3, 2)).sum(), ones((3, 3), (0, 2)))
    assert birth.op.name == "log"
