"""Causes that an op and its operands tell by themselves: a row a cause, with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.families import DECOMPOSITIONS, DIVISIONS, EXPONENTIALS, LOGS, MEANS, POLES, POWERS, ROOTS
from torchdebug_magics.probing.tensors import INF, NAN, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdebug_magics.instruments.nanhunt.evidence import Evidence

__all__ = ["OPERAND_CAUSES", "Diagnosis", "Rule", "is_zero"]


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


Rule: TypeAlias = "Callable[[Evidence], Diagnosis | None]"


def _domain(names: set[str], slug: str, test: Callable[[Evidence], bool], explanation: str, fix: str) -> Rule:
    def rule(evidence: Evidence) -> Diagnosis | None:
        return Diagnosis(slug, explanation, fix) if evidence.name in names and test(evidence) else None

    return rule


def is_zero(value: Any) -> bool:
    """Whether an operand is a number and 0."""
    return isinstance(value, (int, float, complex)) and value == 0


def _operand(place: int, test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    def ask(evidence: Evidence) -> bool:
        values = evidence.operands()
        if not values:
            return False
        value = values[place] if -len(values) <= place < len(values) else None
        return isinstance(value, (int, float)) and test(value)

    return ask


def _div_by_zero(evidence: Evidence) -> bool:
    op = evidence.forward or evidence.op
    if op is not None and len(op.inputs()) == 1 and any(is_zero(value) for value in op.args if not isinstance(value, torch.Tensor)):
        return True
    return _operand(-1, lambda value: value == 0)(evidence)


def _is_zero_times_infinity(evidence: Evidence) -> bool:
    op = evidence.forward or evidence.op
    values = [*evidence.operands(), *(value for value in (op.args if op is not None else ()) if isinstance(value, (int, float)))]
    return any(is_zero(value) for value in values) and any(isinstance(value, float) and math.isinf(value) for value in values)


_LOG_ZERO = _domain(
    LOGS,
    "log_zero",
    lambda one: any(is_zero(value) for value in one.operands()) or one.name == "log1p",
    "the logarithm of 0 is -inf",
    "bound the argument from below, `log(x.clamp(min=1e-6))`, or use `log_softmax` or `BCEWithLogitsLoss`, which stay finite",
)
_LOG_NEGATIVE = _domain(
    LOGS,
    "log_negative",
    _operand(0, lambda value: value < 0),
    "the logarithm of a negative number is NaN",
    "make sure that the argument is positive: `clamp(min=1e-9)`, `softplus`, or a fix of what made it negative",
)
_DIV_ZERO = _domain(
    DIVISIONS, "div_zero", _div_by_zero, "a division by 0", "add a small number to the denominator, or clamp it: `x / y.clamp(min=1e-8)`"
)
_ROOT_ZERO = _domain(
    {"sqrt", "sqrt_", "rsqrt", "rsqrt_", "hypot"},
    "sqrt_zero",
    _operand(0, lambda value: value == 0),
    "the slope of a square root at 0 is infinite",
    "bound it from below, `x.clamp(min=1e-12).sqrt()`; for a distance use `torch.linalg.vector_norm`, which is safe at 0",
)
_ROOT_NEGATIVE = _domain(
    ROOTS,
    "sqrt_negative",
    _operand(0, lambda value: value < 0),
    "the square root of a negative number is NaN",
    "`clamp(min=0)` before the root, and look at what made it negative (a difference of squares loses digits)",
)
_POW_ZERO = _domain(
    POWERS,
    "pow_zero",
    _operand(0, lambda value: value == 0),
    "a power of 0 whose value or slope is infinite",
    "add a small number to the base: `(x + 1e-12) ** p`",
)
_POW_NEGATIVE = _domain(
    POWERS,
    "pow_negative",
    _operand(0, lambda value: value < 0),
    "a fractional power of a negative number is NaN",
    "take `abs()` or `clamp(min=0)` first",
)
_CTC = _domain(
    {"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"},
    "infeasible_ctc",
    lambda _: True,
    "a target is longer than its input allows (repeated labels need a blank between them), so no alignment exists",
    "use `zero_infinity=True`, or drop samples whose input is too short",
)
_POLE = _domain(
    POLES,
    "pole",
    lambda _: True,
    "the argument lies at or beyond the edge of where this function is finite",
    "clamp the argument a little inside, for example `clamp(-1 + 1e-6, 1 - 1e-6)`",
)
_EMPTY_MEAN = _domain(
    MEANS,
    "empty_mean",
    lambda one: (tensor := one.inputs_at(0)) is not None and tensor.numel() == 0,
    "the mean of nothing is 0 / 0",
    "skip the batch when the selection is empty, or divide a sum by `max(count, 1)`",
)
_EXP = _domain(
    EXPONENTIALS,
    "exp_overflow",
    lambda one: one.birth.kind == INF,
    "the exponential left the range of its type",
    "subtract the maximum first, or use `logsumexp`, `softmax` or `softplus`, which do so",
)
_DECOMPOSITION = _domain(
    DECOMPOSITIONS,
    "degenerate_matrix",
    lambda _: True,
    "the matrix is singular, or has equal eigenvalues, where the derivative is infinite",
    "add a little to the diagonal: `A + 1e-6 * torch.eye(n)`",
)


def _has_a_zero_row(evidence: Evidence) -> bool:
    weight, op = evidence.inputs_at(0), evidence.forward or evidence.op
    if weight is None or op is None:
        return False
    kept = op.args[2] if len(op.args) > 2 and isinstance(op.args[2], int) else 0  # noqa: PLR2004 - the third argument is the dimension
    return bool((weight.movedim(kept, 0).reshape(weight.shape[kept], -1) == 0).all(1).any())


_WEIGHT_NORM = _domain(
    {"_weight_norm_interface", "_weight_norm"},
    "zero_norm",
    _has_a_zero_row,
    "a row of the weight is all 0, and weight_norm divides it by its norm: 0 / 0",
    "give that row small random numbers: under weight_norm set the magnitude (`original0`, `weight_g`) to 0, never the direction",
)
_ZERO_TIMES_INFINITY = _domain(
    {"mul", "mul_"},
    "zero_times_inf",
    _is_zero_times_infinity,
    "0 times an infinity is NaN: a product does not switch an infinite value off",
    "choose in place of multiplying, torch.where(mask, x, 0.0) or x.masked_fill(~mask, 0.0), or keep a finite number such as -1e9",
)


def nan_constant(evidence: Evidence) -> Diagnosis | None:
    """A NaN that the code holds as a number."""
    op = evidence.op
    if op is None or not any(map(_is_nan_number, (*op.args, *op.kwargs.values()))):
        return None
    hidden = "; the loss does not show it, its derivative does" if evidence.in_gradient else ""
    return Diagnosis(
        "nan_constant",
        f"NaN was written here, as a number{hidden}",
        "write a finite number in its place, or select the good elements (`x[ok]`) before anything is computed with them",
    )


def _is_nan_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):  # made of a number by torch
        return value.dim() == 0 and value.grad_fn is None and not value.requires_grad and bool(kind_of(value) & NAN)
    return isinstance(value, float) and math.isnan(value)


OPERAND_CAUSES = (
    _CTC,
    _WEIGHT_NORM,
    _EMPTY_MEAN,
    _LOG_ZERO,
    _LOG_NEGATIVE,
    _ROOT_NEGATIVE,
    _ROOT_ZERO,
    _POW_NEGATIVE,
    _POW_ZERO,
    _DIV_ZERO,
    _ZERO_TIMES_INFINITY,
    _EXP,
    _POLE,
    _DECOMPOSITION,
)
"""In the order they are tried."""
