"""Ops that a fake one lets through and a real one refuses: the table of such a model would be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import nn

from torchdebug_magics.instruments.shapes.forward_table import examine_model

if TYPE_CHECKING:
    from collections.abc import Callable


def _put(x: torch.Tensor, at: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[at] = value
    return x


X, WHOLE = torch.randn(3, 4), torch.tensor([0, 1])
REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "an index of two dimensions": (lambda x, at: x.index_select(0, at), (X, torch.ones(2, 3, dtype=torch.long))),
    "doubles put among floats": (_put, (X, WHOLE, torch.randn(2, 4).double())),
    "more rows than places": (_put, (X, WHOLE, torch.randn(3, 4))),
    "more rows than a mask names": (_put, (X, torch.tensor([True, False, True]), torch.randn(3, 4))),
    "a position beyond all elements": (lambda x, at: x.take(at), (X, torch.tensor([12]))),
    "pixels without classes": (F.nll_loss, (torch.randn(2, 4, 5, 5), torch.ones(2, 4, 5, dtype=torch.long))),
    "weights of another dtype": (lambda x, w: F.layer_norm(x, (4,), w), (X, torch.ones(4).double())),
    "a grid of another dtype": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (torch.randn(1, 2, 5, 5), torch.zeros(1, 4, 4, 2).double()),
    ),
    "distances of two dtypes": (torch.cdist, (X, X.double())),
    "more draws than there are": (lambda x: torch.multinomial(x.exp(), 5), (X,)),
    "one less a comparison": (lambda x: 1 - (x > 0), (X,)),
    "a softmax of positions": (lambda x: x.sort().indices.softmax(-1), (X,)),
    "a negative comparison": (lambda x: -(x > 0), (X,)),
    "an order of complex numbers": (lambda x: x > x.flip(0), (torch.randn(3, dtype=torch.complex64),)),
}
ACCEPTED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "one number for a mask": (_put, (X, torch.tensor([True, False, True]), torch.tensor(0.0))),
    "whole numbers written over": (_put, (torch.zeros(3, dtype=torch.long), WHOLE, WHOLE + 5)),
    "half precision with weights of full": (lambda x, w: F.layer_norm(x.bfloat16(), (4,), w), (X, torch.ones(4))),
    "places that are added up": (lambda x, at: torch.zeros(3, 4).scatter(0, at, x, reduce="add"), (X, torch.zeros(3, 4, dtype=torch.long))),
}


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_real_op_refuses_is_a_failure(name: str) -> None:
    function, inputs = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)):
        Net(function)(*inputs)
    assert examine_model(Net(function), *inputs).report.failure is not None


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_a_real_op_takes_is_none_and_nothing_is_written(name: str) -> None:
    function, inputs = ACCEPTED[name]
    before = [one.clone() for one in inputs]
    Net(function)(*inputs)
    assert examine_model(Net(function), *inputs).report.failure is None
    assert all(map(torch.equal, inputs, before))


class Meta(nn.Module):
    """A Linear on the CPU, and what is added to it on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.shift


def test_a_part_without_numbers_is_found() -> None:
    failure = examine_model(Meta(), torch.randn(2, 4)).report.failure
    assert failure is not None
    assert (failure.module, failure.op, failure.fixes) == ("", "add", ())
    assert failure.explanation == ("`add` gets `shift` on meta, without data, and others on cpu; `to_empty(device='cpu')` allocates them")


def test_an_input_without_numbers_is_found() -> None:
    failure = examine_model(nn.Linear(4, 2), torch.randn(2, 4, device="meta")).report.failure
    assert failure is not None
    assert failure.explanation == "`linear` gets `input` on meta, without data, and others on cpu"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_all_of_whose_parts_are_without_numbers_is_asked_for_its_shapes(device: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    report = examine_model(model, torch.randn(2, 4, device=device)).report
    assert (report.failure, report.mode) == (None, "meta")
