"""Findings in the user's words: constants, and gradients that no backward() made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from torchdebug_magics import NonFiniteError, nanhunt

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.report import NanFinding

NAN = float("nan")


def found(do) -> NanFinding:
    with pytest.raises(NonFiniteError) as caught, nanhunt():
        do()
    return caught.value.finding


@pytest.mark.parametrize(
    ("write", "op"),
    [
        (lambda x: torch.where(x > 1, NAN, x), "where"),
        (lambda x: x.masked_fill(x > 1, NAN), "masked_fill"),
    ],
)
def test_a_nan_that_was_written_down_is_told_by_the_op_that_took_it(write, op):
    def step():
        values = torch.arange(4.0, requires_grad=True)
        write(values).sum().backward()

    finding = found(step)
    assert (finding.op, finding.diagnosis, finding.rows) == (op, "nan_constant", (2, 3))
    assert finding.path[0].op == op


def test_a_gradient_from_torch_func_has_its_name_and_no_guess_at_its_cause():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def loss(weights):
        return (torch.func.functional_call(model, weights, (torch.ones(2),)) * 0).abs().sqrt().sum()

    def step():
        gradients = torch.func.grad(loss)(dict(model.named_parameters()))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()

    finding = found(step)
    assert (finding.phase, finding.tensor, finding.diagnosis) == ("optimizer", "weight", None)
    assert "gradient of weight, before the update" in finding.sentence()
    assert "no observed backward() computed it" in finding.explanation


def test_a_gradient_that_changed_after_its_backward_still_blames_what_changed_it():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.ones(2)).sum().backward()
        model.weight.grad.div_(0)
        optimizer.step()

    assert found(step).diagnosis in {"clip_inf", "div_zero"}


def test_the_verdict_says_what_was_born_and_what_became_of_it():
    def step():
        values = torch.zeros(2, requires_grad=True)
        (values.log() * 0).sum().backward()

    finding = found(step)
    assert (finding.kind, finding.sink_kind) == ("inf", "nan")
    assert finding.sentence().startswith("NaN from log in forward · step 0")


def test_a_model_of_buffers_alone_that_nobody_keeps_is_looked_at():
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.zeros(1))

        def forward(self, x):
            return x / self.scale

    def step():
        with torch.no_grad():
            Table()(torch.ones(1))

    assert found(step).op == "div"


@pytest.mark.parametrize("column", [0, 1])
def test_of_two_logarithms_on_a_line_the_bad_one_is_underlined(column):
    def step():
        π = torch.ones(2, 2)  # noqa: PLC2401 - columns are counted in bytes
        π[0, column] = -1
        (π[:, 0].log() + torch.log(π[:, 1])).requires_grad_().sum().backward()

    finding = found(step)
    assert finding.location is not None
    assert finding.underlined is not None
    text = dict(finding.excerpt)[finding.location.line]
    assert text[slice(*finding.underlined)] == ("π[:, 0].log()", "torch.log(π[:, 1])")[column]


def test_a_line_that_is_one_expression_is_not_underlined():
    def step():
        values = torch.zeros(2, requires_grad=True)
        torch.log(values).sum().backward()

    def written():
        values = torch.zeros(2)
        values.log_()
        (values * torch.ones(2, requires_grad=True)).sum().backward()

    assert found(step).underlined is not None
    assert found(written).underlined is None


def test_the_error_of_a_magic_is_one_line_and_only_its_own_session_writes_it():
    with pytest.raises(NonFiniteError) as caught, nanhunt() as outer, nanhunt() as inner:
        torch.zeros(2, requires_grad=True).log().sum().backward()
    lines = [session.traceback_of(caught.value) for session in (outer, inner)]
    place = caught.value.finding.location
    assert sorted(lines) == [[], [f"NonFiniteError: Inf at step 0, {place}; the report is below"]]
    assert inner.traceback_of(ValueError("of the user's")) == outer.traceback_of(ValueError("of the user's")) == []
