"""The cause that is named is the true one, and the repair that is advised repairs: each is applied as it is written."""

from __future__ import annotations

import linecache
import math
from typing import Any

import pytest
import torch

from torchdebug_magics import nanhunt

pytestmark = pytest.mark.filterwarnings("ignore")
N = 3


def hunted(loss: str, x: torch.Tensor, **names: Any) -> Any:
    """The finding of one step whose loss is an expression of `x`."""
    file, text = f"<cell:causes {loss}>", f"value = {loss}\nvalue.sum().backward()\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    x = x.clone().requires_grad_()
    with nanhunt(keep_going=True) as session:
        exec(compile(text, file, "exec"), {"torch": torch, "math": math, "n": N, "x": x, "A": x, **names})
    return session.report.finding


def advised(finding: Any) -> str:
    """The expression that the fix says to write."""
    assert finding.fix.startswith("write `value = "), finding.fix
    return str(finding.fix.partition("`value = ")[2].partition("`")[0])


def row(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("slug", "bad", "repaired", "x"),
    [
        ("log_zero", "x.log()", "x.clamp(min=1e-6).log()", row(0.0, 0.5)),
        ("log_zero", "x.log()", "x.clamp(min=1e-30).log()", row(0.0, 1.0)),  # a mask
        ("log_zero", "torch.log(x - x.min())", "torch.log((x - x.min()).clamp(min=1e-4))", row(3.0, 20.0)),
        ("zero_variance", "x[:1].std(0)", "x[:1].std(0, correction=0)", row(1.0, 2.0)),
        (
            "all_ignored",
            "torch.nn.functional.cross_entropy(x[None], torch.tensor([1]), ignore_index=1)",
            (
                "(torch.nn.functional.cross_entropy(x[None], torch.tensor([1]), ignore_index=1, reduction='sum')"
                " / (torch.tensor([1]) != 1).sum().clamp(min=1))"
            ),
            row(1.0, 2.0),
        ),
        ("log_zero", "torch.log1p(x)", "torch.log1p(x.clamp(min=-1 + 1e-6))", row(-1.0, 1.0)),
        ("log_zero", "(x * 1).log_()", "(x * 1).clamp_(min=1e-6).log_()", row(0.0, 0.5)),
        ("log_negative", "torch.log1p(x)", "torch.log1p(x.clamp(min=-1 + 1e-6))", row(-2.0, 1.0)),
        ("log_negative", "torch.xlogy(x.abs(), x)", "torch.xlogy(x.abs(), x.clamp(min=1e-6))", row(-2.0, 1.0)),
        ("log_zero", "torch.log(torch.sigmoid(x))", "torch.nn.functional.logsigmoid(x)", row(-1000.0, 1.0)),
        ("log_zero", "torch.log(torch.exp(x).sum(-1))", "torch.logsumexp(x, -1)", row(-1000.0, -2000.0)),
        ("exp_overflow", "x.exp().sum().log()", "torch.logsumexp(x, tuple(range(x.dim())))", row(1000.0, 1.0)),
        ("log_zero", "torch.softmax(x, -1).log()", "torch.log_softmax(x, -1)", row(-1000.0, 1.0)),
        ("sqrt_zero", "x.sqrt()", "x.clamp(min=1e-12).sqrt()", row(0.0, 1.0)),
        ("sqrt_zero", "torch.sqrt(x * x)", "torch.sqrt((x * x).clamp(min=1e-12))", row(0.0, 1.0)),
        ("sqrt_zero", "x * x.rsqrt()", "x * x.clamp(min=1e-12).rsqrt()", row(0.0, 1.0)),
        ("sqrt_negative", "x.sqrt()", "x.clamp(min=1e-12).sqrt()", row(-1.0, 0.0, 1.0)),
        ("pow_zero", "x ** 0.5", "x.clamp(min=1e-12) ** 0.5", row(0.0, 1.0)),
        ("pow_negative", "x ** 0.3", "(x.sign() * x.abs().clamp(min=1e-12) ** 0.3)", row(-2.0, 0.0, 1.0)),
        ("div_zero", "x / (x - x)", "x / torch.where(x - x == 0, 1.0, x - x)", row(0.0, 1.0)),
        ("div_zero", "x / x.abs()", "x / x.abs().clamp(min=1e-8)", row(0.0, 1.0)),
        ("div_zero", "x / (x > 2).sum()", "x / (x > 2).sum().clamp(min=1)", row(0.0, 1.0)),
        ("exp_overflow", "x.exp()", "x.clamp(max=30).exp()", row(1000.0, 1.0)),
        ("exp_overflow", "torch.exp2(x)", "torch.exp2(x.clamp(max=30))", row(1000.0, 1.0)),
        ("pole", "x.acos()", "x.clamp(-1 + 1e-6, 1 - 1e-6).acos()", row(1.0, 0.0)),
        ("pole", "torch.arccos(x)", "torch.arccos(x.clamp(-1 + 1e-6, 1 - 1e-6))", row(1.0, 0.0)),
        ("pole", "x.atanh()", "x.clamp(-1 + 1e-6, 1 - 1e-6).atanh()", row(-1.0, 0.0)),
        ("pole", "x.acosh()", "x.clamp(min=1 + 1e-6).acosh()", row(1.0, 2.0)),
        ("pole", "x.logit()", "x.clamp(1e-6, 1 - 1e-6).logit()", row(1.0, 0.5)),
        ("pole", "x.lgamma()", "x.clamp(min=1e-6).lgamma()", row(0.0, 1.0)),
        ("where_trap", "torch.where(x > 0, x.log(), 0.0)", "torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0)", row(0.0, 0.5)),
        ("where_trap", "torch.where(x != 0, 1 / x, 0.0)", "torch.where(x != 0, 1 / torch.where(x != 0, x, 1.0), 0.0)", row(0.0, 0.5)),
        ("zero_variance", "x[:1].std()", "x[:1].std(correction=0)", row(1.0, 2.0)),
        ("masked_row", "(x - math.inf).softmax(-1)", "(x - math.inf).clamp(min=-1e9).softmax(-1)", row(1.0, 2.0)),
        (
            "mask_sign",
            "x.masked_fill(x > 1, math.inf).softmax(-1).square()",
            "x.masked_fill(x > 1, float('-inf')).softmax(-1).square()",
            row(0.5, 1.0, 2.0),
        ),
        ("fp16_overflow", "(x * x).float()", "(x.float() * x).float()", row(300.0, 1.0, dtype=torch.float16)),
    ],
)
def test_the_advised_repair_is_in_the_users_expression_and_was_tried(slug: str, bad: str, repaired: str, x: torch.Tensor) -> None:
    finding = hunted(bad, x)
    assert finding is not None
    assert finding.diagnosis == slug, finding.explanation
    assert advised(finding) == repaired
    assert "rerun with it, the bad step is finite" in finding.fix
    assert hunted(repaired, x) is None


def test_a_mean_of_nothing_is_advised_in_words() -> None:
    finding = hunted("x[x > 5].mean()", row(1.0, 2.0))
    assert finding.diagnosis == "empty_mean"
    assert "the number of elements, at least 1" in finding.fix


def test_of_two_logarithms_on_a_line_the_bad_one_is_changed() -> None:
    finding = hunted("torch.log(x + 1) + torch.log(x) - x.log1p()", row(0.0, 0.5))
    assert advised(finding) == "torch.log(x + 1) + torch.log(x.clamp(min=1e-6)) - x.log1p()"


def test_a_second_birth_behind_the_first_is_repaired_as_well() -> None:
    finding = hunted("(x - x.mean()) / x.std()", row(2.0))
    assert advised(finding) == "(x - x.mean()) / x.std(correction=0).clamp(min=1e-8)"


def test_what_does_not_end_the_fault_is_no_code() -> None:
    finding = hunted("torch.log(x) * 1e38 * 1e38", row(0.0, 0.5))
    assert "write `" not in finding.fix
    assert "finite" not in finding.fix.partition(",")[0]


def test_the_advised_repair_of_a_matrix() -> None:
    zeros = torch.zeros(N, N)
    finding = hunted("torch.linalg.inv_ex(A)[0]", zeros)
    assert finding is not None
    assert finding.diagnosis == "degenerate_matrix"
    assert "A + 1e-4 * torch.eye(A.shape[-1])" in advised(finding)
    assert hunted(advised(finding), zeros) is None


def half(dtype: torch.dtype, loss: str, value: float) -> Any:
    return hunted(loss, row(value, 1.0, dtype=dtype))


def test_half_precision_is_to_blame_only_where_float32_holds_the_result() -> None:
    assert half(torch.float16, "(x * x).float()", 300.0).diagnosis == "fp16_overflow"
    assert half(torch.float16, "x.exp().float()", 20.0).diagnosis == "fp16_overflow"
    too_much = half(torch.float16, "x.exp().float()", 200.0)
    assert too_much.diagnosis == "exp_overflow"
    assert "float32" not in too_much.fix
    assert "float32 has the same range" in half(torch.bfloat16, "x * x", 1e30).fix
    assert "torch.finfo" in hunted("(x * 1).bfloat16()", row(torch.finfo(torch.float32).min, 1.0)).fix


def test_a_small_number_that_float16_does_not_hold_is_not_advised() -> None:
    finding = half(torch.float16, "x.sqrt()", 0.0)
    assert finding.diagnosis == "sqrt_zero"
    assert advised(finding) == "x.clamp(min=1e-6).sqrt()"


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
    assert session.report.finding.explanation.endswith("no other row than row 2 overflows")


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


def test_a_complex_number_is_no_reason_to_lose_the_finding() -> None:
    finding = hunted("torch.log(torch.complex(x, x)).abs()", row(0.0, 0.5))
    assert (finding.op, finding.diagnosis) == ("log", "log_zero")


PADDED = torch.tensor([[False, False, False], [True, True, True]])


@pytest.mark.parametrize(
    "softmax",
    [
        "(x + mask).softmax(-1)",
        "(x + mask).log_softmax(-1).exp()",
        "torch.exp((x + mask) - (x + mask).amax(-1, keepdim=True))",
        "torch.exp((x + mask) - (x + mask).logsumexp(-1, keepdim=True))",
    ],
)
@pytest.mark.parametrize("dropped", ["[:1]", ".nan_to_num()", ".masked_fill(padded, 0.0)"])
def test_a_masked_row_is_the_cause_also_when_its_output_is_dropped(softmax: str, dropped: str) -> None:
    mask = torch.zeros(2, 3).masked_fill(PADDED, -math.inf)
    finding = hunted(f"({softmax}){dropped}", torch.ones(2, 3), mask=mask, padded=PADDED)
    assert finding.diagnosis == "masked_row"
    assert finding.rows == (1,)
