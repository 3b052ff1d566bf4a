"""The cause that is named is the true one, and the repair that is advised repairs: each is applied as it is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchdebug_magics import nanhunt

pytestmark = pytest.mark.filterwarnings("ignore")
N = 3


def hunted(loss: str, x: torch.Tensor, **names: Any) -> Any:
    """The finding of one step whose loss is an expression of `x`."""
    x = x.clone().requires_grad_()
    with nanhunt(keep_going=True) as session:
        value = eval(loss, {"torch": torch, "math": math, "n": N, "x": x, "A": x, **names})
        value.sum().backward()
    return session.report.finding


def row(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("slug", "bad", "advised", "repaired", "x"),
    [
        ("log_zero", "x.log()", "log(x.clamp(min=1e-6))", "x.clamp(min=1e-6).log()", row(0.0, 1.0)),
        ("log_zero", "torch.log1p(x)", "log1p(x.clamp(min=-1 + 1e-6))", "torch.log1p(x.clamp(min=-1 + 1e-6))", row(-1.0, 1.0)),
        ("log_zero", "x.log_()", "log(x.clamp(min=1e-6))", "x.clamp(min=1e-6).log()", row(0.0, 1.0)),
        ("log_negative", "torch.log1p(x)", "clamp(min=1e-6)", "torch.log1p(x.clamp(min=1e-6))", row(-2.0, 1.0)),
        ("log_negative", "torch.xlogy(x.abs(), x)", "clamp(min=1e-6)", "torch.xlogy(x.abs(), x.clamp(min=1e-6))", row(-2.0, 1.0)),
        ("sqrt_zero", "x.sqrt()", "x.clamp(min=1e-12).sqrt()", "x.clamp(min=1e-12).sqrt()", row(0.0, 1.0)),
        ("sqrt_zero", "x * x.rsqrt()", "(x + 1e-6).rsqrt()", "x * (x + 1e-6).rsqrt()", row(0.0, 1.0)),
        (
            "sqrt_zero",
            "torch.hypot(x[:1], x[1:])",
            "(x * x + y * y).clamp(min=1e-12).sqrt()",
            "(x[:1] * x[:1] + x[1:] * x[1:]).clamp(min=1e-12).sqrt()",
            row(0.0, 0.0),
        ),
        ("sqrt_negative", "x.sqrt()", "clamp(min=1e-12)", "x.clamp(min=1e-12).sqrt()", row(-1.0, 0.0)),
        ("pow_zero", "x ** 0.5", "(x + 1e-12) ** p", "(x + 1e-12) ** 0.5", row(0.0, 1.0)),
        ("pow_negative", "x ** 0.3", "x.clamp(min=1e-6)", "x.clamp(min=1e-6) ** 0.3", row(-2.0, 0.0)),
        ("pow_negative", "b ** x", "x.abs().clamp(min=1e-6)", "b.abs().clamp(min=1e-6) ** x", row(2.0, 2.0)),
        ("div_zero", "x / (x - x)", "x / y.clamp(min=1e-8)", "x / (x - x).clamp(min=1e-8)", row(0.0, 1.0)),
        ("exp_overflow", "x.exp()", "exp(x.clamp(max=30))", "x.clamp(max=30).exp()", row(1000.0, 1.0)),
        ("exp_overflow", "torch.exp2(x)", "exp(x.clamp(max=30))", "torch.exp2(x.clamp(max=30))", row(1000.0, 1.0)),
        ("exp_overflow", "x.expm1_()", "exp(x.clamp(max=30))", "x.clamp(max=30).expm1()", row(1000.0, 1.0)),
        ("pole", "x.acos()", "x.clamp(-1 + 1e-6, 1 - 1e-6)", "x.clamp(-1 + 1e-6, 1 - 1e-6).acos()", row(1.0, 0.0)),
        ("pole", "x.atanh()", "x.clamp(-1 + 1e-6, 1 - 1e-6)", "x.clamp(-1 + 1e-6, 1 - 1e-6).atanh()", row(-1.0, 0.0)),
        ("pole", "x.acosh()", "x.clamp(min=1 + 1e-6)", "x.clamp(min=1 + 1e-6).acosh()", row(1.0, 2.0)),
        ("pole", "x.logit()", "x.clamp(1e-6, 1 - 1e-6)", "x.clamp(1e-6, 1 - 1e-6).logit()", row(1.0, 0.5)),
        ("pole", "x.lgamma()", "x.clamp(min=1e-6)", "x.clamp(min=1e-6).lgamma()", row(0.0, 1.0)),
    ],
)
def test_the_advised_repair_of_a_function(slug: str, bad: str, advised: str, repaired: str, x: torch.Tensor) -> None:
    finding = hunted(bad.replace("x.log_()", "(x * 1).log_()").replace("x.expm1_()", "(x * 1).expm1_()"), x, b=row(-2.0, -1.0))
    assert finding is not None
    assert finding.diagnosis == slug, finding.explanation
    assert f"{advised}" in finding.fix
    assert hunted(repaired, x, b=row(-2.0, -1.0)) is None


WEIGHTS = torch.arange(9.0).reshape(N, N)
EYE, ZEROS = torch.eye(N), torch.zeros(N, N)
UNLIKE, DIAGONAL = "A + torch.diag(1e-4 * torch.arange(n))", "A + 1e-4 * torch.eye(n)"


@pytest.mark.parametrize(
    ("loss", "advised", "matrix"),
    [
        ("torch.linalg.eigh({})[1] * w", UNLIKE, EYE),
        ("torch.linalg.svd({})[0] * w", UNLIKE, EYE),
        ("torch.linalg.inv_ex({})[0]", DIAGONAL, ZEROS),
        ("torch.linalg.slogdet({})[1]", DIAGONAL, ZEROS),
        ("torch.linalg.qr({})[0] * w", DIAGONAL, ZEROS),
        ("torch.linalg.solve_ex({}, w)[0]", DIAGONAL, ZEROS),
    ],
)
def test_the_advised_repair_of_a_matrix(loss: str, advised: str, matrix: torch.Tensor) -> None:
    finding = hunted(loss.format("A"), matrix, w=WEIGHTS)
    assert finding is not None
    assert finding.diagnosis == "degenerate_matrix"
    assert advised in finding.fix
    assert hunted(loss.format(f"({advised})"), matrix, w=WEIGHTS) is None


@pytest.mark.parametrize(
    ("values", "test"), [("x.log()", "x > 0"), ("1 / x", "x != 0"), ("x.exp()", "x < 30"), ("x.acos()", "x.abs() < 1")]
)
def test_the_advised_repair_of_a_value_that_is_thrown_away(values: str, test: str) -> None:
    x = row(1000.0, 0.5) if "exp" in values or "acos" in values else row(0.0, 0.5)
    thrown_away = f"torch.where({test}, {values}, 0.0)"
    finding = hunted(thrown_away, x)
    assert finding is not None
    assert finding.diagnosis == "where_trap"
    assert f"x = torch.where({test}, x, 1.0)" in finding.fix
    safe = f"torch.where({test}, x, 1.0)" if "acos" not in values else f"torch.where({test}, x, 1.0).mul(0.5)"
    assert (
        hunted(f"torch.where({test}, {values.replace('x', f'({safe})', 1) if 'exp' not in values else f'({safe}).exp()'}, 0.0)", x) is None
    )


def half(dtype: torch.dtype, loss: str, value: float) -> Any:
    return hunted(loss, row(value, 1.0, dtype=dtype))


def test_half_precision_is_to_blame_only_where_float32_holds_the_result() -> None:
    assert half(torch.float16, "(x * x).float()", 300.0).diagnosis == "fp16_overflow"
    assert half(torch.float16, "x.exp().float()", 20.0).diagnosis == "fp16_overflow"
    too_much = half(torch.float16, "x.exp().float()", 200.0)
    assert too_much.diagnosis == "exp_overflow"
    assert "float32" not in too_much.fix
    assert "float32 reaches no further" in half(torch.bfloat16, "x * x", 1e30).fix
    assert "torch.finfo(x.dtype).min" in hunted("(x * 1).bfloat16()", row(torch.finfo(torch.float32).min, 1.0)).fix


def test_a_small_number_that_float16_does_not_hold_is_advised_with_a_way_to_hold_it() -> None:
    finding = half(torch.float16, "x.sqrt()", 0.0)
    assert finding.diagnosis == "sqrt_zero"
    assert "call `.float()` first" in finding.fix
    assert ".float()" not in half(torch.float32, "x.sqrt()", 0.0).fix


def test_an_overflow_says_what_was_given() -> None:
    finding = hunted("x * x", row(1e30, 1.0))
    assert (finding.diagnosis, finding.op) == ("overflow", "mul")
    assert "3.403e+38" in finding.explanation
    assert "1e+30" in finding.explanation


def test_an_even_power_of_a_negative_number_overflows_and_is_no_fractional_one() -> None:
    assert hunted("x ** 2", row(-1e30, 1.0)).diagnosis == "overflow"


def test_a_row_of_data_out_of_line_is_named() -> None:
    net = torch.nn.Linear(3, 1)
    x = torch.rand(4, 3)
    x[2, 1] = 3e38
    with nanhunt(keep_going=True) as session:
        loss = (net(x) ** 2).mean()
        loss.backward()
    assert session.report.finding.rows == (2,)
    assert session.report.finding.explanation.endswith("row 2 of x holds 3e+38")


def test_a_weight_is_not_blamed_for_what_it_is_multiplied_with() -> None:
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(net.weight, 3.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    with nanhunt(keep_going=True) as session:
        for calls in (1, 80):
            h = torch.ones(1, 2)
            for _ in range(calls):
                h = net(h)
            loss = h.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert session.report.finding.diagnosis == "overflow"
    assert "weight" not in session.report.finding.explanation


def test_an_infinity_that_was_meant_and_stayed() -> None:
    finding = hunted("torch.full((3,), -math.inf).scatter_reduce(0, torch.tensor([0, 2]), x, 'amax').square()", row(1.0, 2.0))
    assert finding.diagnosis == "inf_constant"
    assert finding.rows == (1,)


def test_the_largest_number_that_stands_for_an_infinity_overflows() -> None:
    finding = hunted("torch.nan_to_num(x.detach().log() + x).sum() * 2", row(0.0, 0.0))
    assert (finding.op, finding.diagnosis) == ("sum", "overflow")
    assert "posinf=0.0" in finding.fix
    assert hunted("torch.nan_to_num(x.detach().log() + x, posinf=0.0, neginf=0.0).sum()", row(0.0, 0.0)) is None


def test_a_column_that_is_bad_in_every_row() -> None:
    net, x = torch.nn.Linear(3, 1), torch.rand(4, 3)
    x[:, 1] = math.nan
    with nanhunt(keep_going=True) as session:
        loss = net(x).mean()
        loss.backward()
    assert session.report.finding.diagnosis == "bad_data_row"
    assert "column 1 of every row" in session.report.finding.explanation
    assert "column 1" in session.report.finding.fix


def test_a_run_that_diverges_with_a_smaller_step_in_between() -> None:
    w = torch.ones(1, requires_grad=True)
    with nanhunt(keep_going=True) as session:
        for size in (1.0, 10.0, 1e8, 1e26, 7e25, math.inf):
            loss = (w * size).sum() if math.isfinite(size) else (w * 1e38 * w.detach() * 10).sum()
            loss.backward()
            w.grad = None
    assert session.report.finding.diagnosis == "lr_too_high"
    assert "from 1.0 to 1e+26" in session.report.finding.explanation
