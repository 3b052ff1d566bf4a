"""Whether a replay reached the same: loss, gradients, and the variables of the step."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from torchdebug_magics import NonFiniteError, nanhunt
from torchdebug_magics.instruments.nanhunt.rerun.attempt import agree, badly_alike, same_bits, same_kinds

# ruff: noqa: PT012 - whole steps are watched
nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "kinds", "bad"),
    [
        ([1.0, nan], [2.0, nan], True, True),
        ([1.0, 2.0], [2.0, 1.0], True, False),
        ([nan, 1.0], [1.0, nan], False, False),
        ([inf], [-inf], False, False),
        ([inf], [nan], False, False),
    ],
)
def test_alike_in_what_is_bad(one: list[float], other: list[float], kinds: bool, bad: bool) -> None:
    left, right = (torch.tensor(one),), (torch.tensor(other),)
    assert same_kinds(left, right) is kinds
    assert badly_alike(left, right) is bad


@pytest.mark.parametrize("unknown", [True, False])
def test_what_cannot_be_compared_is_unknown(unknown: bool) -> None:
    one, sparse = torch.ones(2), torch.eye(2).to_sparse()
    assert agree(one, 3, same_bits, unknown=unknown) is unknown
    assert agree(sparse, sparse, same_bits, unknown=unknown) is unknown
    assert agree(one, one.clone(), same_bits, unknown=unknown) is True


def test_two_bad_losses_are_not_the_same_step_where_a_variable_differs() -> None:
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        out = model(x)
        noise = torch.tensor([float(byte) for byte in os.urandom(16)])
        loss = (out * 0 - 1).log().sum() + noise.sum()
        loss.backward()
    assert session.report.reproduced is False
    assert any("not reproduced" in problem for problem in session.report.problems)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_two_bad_losses_are_not_the_same_step_where_the_gradients_differ() -> None:
    model, x = Scale(), torch.ones(128)

    def bits() -> torch.Tensor:
        return torch.tensor([float(byte % 2) for byte in os.urandom(128)])

    with pytest.raises(NonFiniteError), nanhunt() as session:
        # Which weights get a bad gradient is drawn anew in a replay; the loss is -inf both times.
        (model(x) * bits().log()).sum().backward()
    assert session.report.reproduced is False
