"""The bad step once more: what it reaches, what it says, and that everything is as it was afterwards."""

# ruff: noqa: PT012 - what raises is a whole step, watched

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from torchdebug_magics import NonFiniteError, nanhunt

nan, inf = float("nan"), float("inf")


def bad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * 0 - 1).sqrt().sum()


def test_what_the_step_prints_and_warns_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("forward")
            print("error", file=sys.stderr)
            warnings.warn("careful", stacklevel=1)
            return super().forward(x)

    model = Loud(2, 1)
    with warnings.catch_warnings(record=True) as seen, nanhunt(keep_going=True) as session:
        warnings.simplefilter("always")
        loss = bad(model, torch.ones(1, 2))
        loss.backward()
    assert session.report.found
    assert capsys.readouterr() == ("forward\n", "error\n")
    assert [str(one.message) for one in seen] == ["careful"]


def test_what_the_step_logs_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    class Loud(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logging.getLogger("mine").warning("forward")
            return super().forward(x)

    model = Loud(2, 1)
    with nanhunt(keep_going=True) as session:
        loss = bad(model, torch.ones(1, 2))
        loss.backward()
    logging.getLogger("mine").warning("after")
    assert session.report.found
    assert [record.message for record in caplog.records] == ["forward", "after"]


def test_a_stream_that_the_user_put_in_place_stays() -> None:
    said, model = io.StringIO(), nn.Linear(2, 1)
    with contextlib.redirect_stdout(said), nanhunt(keep_going=True):
        loss = bad(model, torch.ones(1, 2))
        loss.backward()
        assert sys.stdout is said


def test_gradients_of_before_are_there_again_and_the_same_objects() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    before = {name: (one.grad, one.grad.clone()) for name, one in model.named_parameters()}
    with nanhunt(layers=True):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    for name, one in model.named_parameters():
        assert one.grad is before[name][0]
        assert torch.equal(one.grad, 2 * before[name][1])


def test_inputs_that_need_gradients_keep_theirs() -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    with nanhunt(layers=True):
        loss = model(x).sum()
        loss.backward()
    assert torch.equal(x.grad, model.weight)


def test_a_replay_that_goes_another_way_is_not_reproduced_and_said() -> None:
    model, ticks = nn.Linear(2, 1), itertools.count(1)

    def clock() -> float:
        return float(next(ticks))

    with pytest.raises(NonFiniteError), nanhunt() as session:
        loss = model(torch.ones(1, 2)).square().sum() * clock() + (torch.zeros(1) - 1).sqrt().sum() + torch.zeros(1).log().sum() * 0
        loss = torch.where(torch.tensor(True), loss, loss)
        loss.backward()
    # NaN in both runs: the same bits, whatever the clock says.
    assert session.report.reproduced is True


def test_another_loss_is_said() -> None:
    model, ticks = nn.Linear(2, 1), itertools.count(1)

    def clock() -> float:
        return float(next(ticks))

    with pytest.raises(NonFiniteError), nanhunt() as session:
        out = model(torch.ones(1, 2))
        h = out * 0
        loss = h.sqrt().sum() + clock()
        loss.backward()
    assert session.report.finding.phase == "backward"
    assert session.report.reproduced is False
    assert any("not reproduced" in problem for problem in session.report.problems)


def test_a_replay_never_takes_an_optimizer_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with nanhunt(keep_going=True) as session:
        for _ in range(3):
            loss = bad(model, torch.ones(1, 2)) * 0 + model(torch.ones(1, 2)).sum()
            loss = torch.nan_to_num(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.report.steps_count == 3


def test_two_backwards_of_one_step_the_second_is_bad() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(NonFiniteError), nanhunt() as session:
        out = model(torch.ones(1, 2))
        first = out.square().sum()
        first.backward(retain_graph=True)
        second = (out * 0 - 1).sqrt().sum()
        second.backward()
    assert (session.report.finding.op, session.report.finding.backward) == ("sqrt", 1)
    assert session.report.reproduced is True


def test_a_model_in_evaluation_and_one_in_training() -> None:
    teacher, student = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(NonFiniteError), nanhunt() as session:
        x = torch.randn(4, 2)
        with torch.no_grad():
            target = teacher(x)
        out = student(x)
        loss = ((out - target) * 0 - 1).sqrt().sum()
        loss.backward()
    assert session.report.finding.op == "sqrt"
    assert session.report.reproduced is True
    assert student[1].num_batches_tracked == 0


def test_autocast_outside_the_statements_is_there_in_the_replay() -> None:
    model = nn.Linear(2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NonFiniteError), nanhunt() as session:
        loss = (model(torch.full((1, 2), 3.0)) * 0 - 1).sqrt().sum()
        loss.backward()
    assert session.report.reproduced is True


def test_grad_mode_and_default_dtype_after_an_error_in_the_replay() -> None:
    model, calls = nn.Linear(2, 1), itertools.count()

    def hook(*_: Any) -> None:
        if next(calls):
            torch.set_grad_enabled(False)
            raise ValueError

    model.register_forward_hook(hook)
    try:
        with nanhunt(keep_going=True):
            loss = bad(model, torch.ones(1, 2))
            loss.backward()
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_train_mode_that_the_step_switches_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    with nanhunt(keep_going=True):
        model.train()
        out = model(torch.ones(1, 2))
        model.eval()
        loss = (out * 0 - 1).sqrt().sum()
        loss.backward()
    assert not model.training


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def test_what_is_computed_inside_the_models_argument_is_no_bad_data() -> None:
    model = nn.Linear(3, 1)
    x = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    with nanhunt(keep_going=True) as session:
        loss = model(normalised(x)).mean()
        loss.backward()
    finding = session.report.finding
    assert (finding.phase, finding.op, finding.rows) == ("loss", "div", (1,))
    assert finding.location.function == "normalised"


def test_a_leaf_that_a_function_makes_is_the_replays_own() -> None:
    critic = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    for parameter in critic.parameters():
        nn.init.constant_(parameter, 1.0 if parameter.dim() > 1 else 0.0)
    x = torch.full((3, 2), -9.0)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        inner = (x * 1).requires_grad_()
        (slope,) = torch.autograd.grad(critic(inner).sum(), inner, create_graph=True)
        return ((slope.pow(2).sum(1).sqrt() - 1) ** 2).mean()

    with nanhunt(keep_going=True) as session:
        loss = penalty(x)
        loss.backward()
    finding = session.report.finding
    assert (finding.phase, finding.op) == ("backward", "sqrt")
    assert session.report.problems == ()
