"""Weights that were bad before the cell, and weights that the user's own lines spoil in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchdebug_magics import NonFiniteError, nanhunt

# ruff: noqa: PT012 - whole steps are watched
X = torch.ones(4, 2)


def update(teacher: nn.Module, rate: float) -> None:
    for one in teacher.parameters():
        one.data.mul_(rate)


def test_the_line_that_writes_into_a_spoilt_model_is_named() -> None:
    student, teacher = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        for rate in (1.0, float("nan"), 1.0):
            loss = (student(X) - teacher(X).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update(teacher, rate)
    finding = caught.value.finding
    assert (finding.phase, finding.tensor, finding.model, finding.spoilt_here) == ("parameter", "weight", "teacher", True)
    assert "teacher.weight, since step 1 of this cell" in finding.sentence()
    assert "`update(teacher, rate)`" in finding.fix


def test_of_two_such_lines_none_is_blamed() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        update(model, float("nan"))
        model.load_state_dict(model.state_dict())
        model(X).sum().backward()
    assert caught.value.finding.spoilt_here
    assert "update(" not in caught.value.finding.fix


def test_weights_that_were_bad_before_the_cell_are_said_to_be() -> None:
    model = nn.Linear(2, 1)
    model.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        model(X).sum().backward()
    assert not caught.value.finding.spoilt_here
    assert "from before this cell" in caught.value.finding.sentence()
