"""Whether a replay reached the same: loss, gradients, and the variables of the step."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from torchdebug_magics import NonFiniteError, nanhunt

# ruff: noqa: PT012 - whole steps are watched
nan, inf = float("nan"), float("inf")


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
