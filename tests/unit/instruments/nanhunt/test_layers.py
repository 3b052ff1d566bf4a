from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics import nanhunt

nan, inf = math.nan, math.inf


class Fixed(nn.Module):
    """Gives what it was made with, in the graph of its input."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values + x.sum() * 0


def rows(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    with nanhunt(keep_going=True, **options) as session:
        out = model(x)
        loss = out.sum()
        loss.backward()
    return session.report.layers


def test_counts_and_extremes_of_a_bad_step() -> None:
    (row,) = rows(Fixed(torch.tensor([[1.0, nan, inf], [-inf, -3.0, inf]])), torch.ones(1, requires_grad=True))
    assert (row.nan_count, row.posinf_count, row.neginf_count) == (1, 2, 1)
    assert (row.min, row.max, row.mean_abs) == (-3.0, 1.0, 2.0)
    assert (row.module, row.type, row.call, row.shape, row.dtype) == ("", "Fixed", 1, (2, 3), "float32")


def test_the_share_of_the_range_of_fp16() -> None:
    (row,) = rows(Fixed(torch.tensor([65504.0 * 2, -1.0])), torch.ones(1, requires_grad=True), layers=True)
    assert row.fp16_share == pytest.approx(2.0)


def test_gradients_of_outputs() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    table = rows(model, torch.ones(3, 2), layers=True)
    assert [row.module for row in table] == ["0", "1", ""]
    assert [row.grad_max_abs for row in table[1:]] == [1.0, 1.0]
    assert table[0].grad_mean_abs == pytest.approx(model[1].weight.sum(0).abs().mean().item())
    assert all((row.grad_nan_count, row.grad_inf_count) == (0, 0) for row in table)


def test_a_bad_gradient_is_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Flatten())
    with torch.no_grad():
        model[0].weight.zero_()
    with nanhunt(keep_going=True) as session:
        loss = model(torch.ones(3, 2)).sqrt().sum()
        loss.backward()
    assert session.report.finding.phase == "backward"
    assert [row.grad_inf_count for row in session.report.layers] == [6, 6, 6]


def test_a_shared_module_has_a_row_a_call() -> None:
    shared = nn.Linear(2, 2)
    table = rows(nn.Sequential(shared, nn.ReLU(), shared), torch.ones(1, 2), layers=True)
    assert [(row.module, row.call) for row in table if row.type == "Linear"] == [("0", 1), ("0", 2)]


def test_no_gradient_is_none() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a(x)
            return self.b(x)

    table = {row.module: row for row in rows(Cut(), torch.ones(1, 1), layers=True)}
    assert table["a"].grad_max_abs is None
    assert table["b"].grad_max_abs == 1.0


@dataclasses.dataclass
class Out:
    text: str
    hidden: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [lambda x: (x, None), lambda x: {"a": x}, lambda x: Out("t", x), lambda x: [x], lambda x: ((x,),)],
    ids=["tuple", "dict", "dataclass", "list", "nested"],
)
def test_the_first_tensor_stands_for_a_nested_output(wrap: Any) -> None:
    class Wraps(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(x * 2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wraps()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            return x * 1

    table = rows(Whole(), torch.ones(3, requires_grad=True), layers=True)
    assert [row.module for row in table] == ["inner", ""]
    assert table[0].max == 2.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([1 + 2j]) * x.sum(),
        lambda x: torch.eye(2).to_sparse(),
        lambda x: torch.empty(2, device="meta"),
        lambda x: x.detach().to(torch.float8_e4m3fn),
        lambda x: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda x: torch.ones(0),
        lambda x: torch.ones(2, dtype=torch.long),
        lambda x: None,
        lambda x: "text",
    ],
    ids=["complex", "sparse", "meta", "float8", "quantised", "nested", "strided nested", "empty", "integers", "none", "text"],
)
def test_no_kind_of_output_is_an_error(make: Any) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.odd(x)
            return x * 1

    with nanhunt(layers=True) as session:
        out = Whole()(torch.ones(2, requires_grad=True))
        loss = out.sum()
        loss.backward()
    assert session.report.problems == ()
    assert session.report.layers[-1].module == ""


def test_looking_takes_no_gradient_hook_along() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    model = nn.Linear(2, 1)
    with nanhunt(layers=True):
        out = model(x)
        loss = out.sum()
        loss.backward()
    assert out._backward_hooks is None
