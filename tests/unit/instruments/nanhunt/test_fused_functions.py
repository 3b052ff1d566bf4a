"""A logarithm of a sigmoid or of a softmax is offered as the one function that does both, in the user's own expression."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from torchdebug_magics import nanhunt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanFinding

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.tensor([[1.0, 2.0, -1.0], [-2.0, 0.5, 1.0], [0.3, -1.0, 2.0], [2.0, 2.0, 2.0]]) * 1e4
Y, CLASSES = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 1, 2, 1])
ONE, THREE = nn.Linear(3, 1), nn.Linear(3, 3)
SIGMOID, SOFTMAX = nn.Sigmoid(), nn.Softmax(dim=1)


@pytest.fixture(autouse=True)
def _weights() -> None:
    with torch.no_grad():
        ONE.weight.copy_(torch.tensor([[1.0, -0.5, 0.3]]))
        THREE.weight.copy_(torch.tensor([[1.0, -0.5, 0.3], [0.1, 0.7, -1.0], [-0.2, 0.2, 0.9]]))
    ONE.zero_grad()
    THREE.zero_grad()


def fix_of(step: Callable[[], None]) -> str:
    with nanhunt(keep_going=True) as session:
        step()
    finding: NanFinding | None = session.report.finding
    assert finding is not None
    assert (finding.op, finding.diagnosis) == ("log", "log_zero")
    return finding.fix


def mean() -> None:
    z = ONE(X).squeeze(1)
    loss = -(Y * torch.log(torch.sigmoid(z)) + (1 - Y) * torch.log(1 - torch.sigmoid(z))).mean()
    loss.backward()


def total() -> None:
    z = ONE(X).squeeze(1)
    p = SIGMOID(z)
    loss = (-Y * torch.log(p) - (1.0 - Y) * torch.log(1.0 - p)).sum()
    loss.backward()


def weighted() -> None:
    z = ONE(X).squeeze(1)
    p = z.sigmoid()
    weight = torch.ones(4)
    loss = (weight * (Y * p.log() + (1 - Y) * (1 - p).log())).mean()
    (-loss).backward()


def two_statements() -> None:
    z = ONE(X).squeeze(1)
    p = torch.sigmoid(z)
    positive = Y * torch.log(p)
    negative = (1 - Y) * torch.log(1 - p)
    loss = -(positive + negative).mean()
    loss.backward()


def discriminator() -> None:
    real, fake = ONE(X), ONE(-X)
    loss = -(torch.log(torch.sigmoid(real)) + torch.log(1 - torch.sigmoid(fake))).mean()
    loss.backward()


def chosen() -> None:
    z = THREE(X)
    p = F.softmax(z, dim=1)
    loss = -torch.log(p[torch.arange(4), CLASSES]).mean()
    loss.backward()


def nll() -> None:
    loss = F.nll_loss(torch.log(SOFTMAX(THREE(X))), CLASSES)
    loss.backward()


@pytest.mark.parametrize(
    ("step", "written"),
    [
        (mean, ["loss = -(Y * F.logsigmoid(z) + (1 - Y) * F.logsigmoid(-z)).mean()"]),
        (total, ["loss = (-Y * F.logsigmoid(z) - (1.0 - Y) * F.logsigmoid(-z)).sum()"]),
        (weighted, ["loss = (weight * (Y * F.logsigmoid(z) + (1 - Y) * F.logsigmoid(-z))).mean()"]),
        (two_statements, ["positive = Y * F.logsigmoid(z)", "negative = (1 - Y) * F.logsigmoid(-z)"]),
        (discriminator, ["loss = -(F.logsigmoid(real) + F.logsigmoid(-fake)).mean()"]),
        (chosen, ["loss = -torch.log_softmax(z, dim=1)[torch.arange(4), CLASSES].mean()"]),
        (nll, ["loss = F.nll_loss(torch.log_softmax(THREE(X), dim=1), CLASSES)"]),
    ],
)
def test_the_one_function_stands_in_the_users_expression(step: Callable[[], None], written: list[str]) -> None:
    fix = fix_of(step)
    for text in written:
        assert f"`{text.replace('F.', 'torch.nn.functional.').replace('torch.nn.functional.nll', 'F.nll')}`" in fix
    assert "rerun with it, the bad step is finite" in fix


def test_logits_that_are_gone_are_not_written() -> None:
    def step() -> None:
        z = ONE(X).squeeze(1)
        z = torch.sigmoid(z)
        loss = -(Y * torch.log(z) + (1 - Y) * torch.log(1 - z)).mean()
        loss.backward()

    assert "logits" not in fix_of(step)
    assert "logsigmoid" not in fix_of(step)


def test_a_clamp_behind_a_saturated_sigmoid_trains_nothing_and_is_not_called_verified() -> None:
    def made() -> torch.Tensor:
        return torch.sigmoid(ONE(X)).squeeze(1)

    def step() -> None:
        p = made()
        loss = -torch.log(p).mean()
        loss.backward()

    assert "no gradient is left" in fix_of(step)
