"""Causes that an op and its operands tell by themselves: a row a cause, with the sentence that explains it and the line that repairs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchdebug_magics.instruments.nanhunt.causes.op_families import DIVISIONS, LOGS, MEANS, POWERS, ROOTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence

__all__ = ["OPERAND_CAUSES", "Diagnosis", "Rule", "domain", "is_zero", "operand"]


@dataclass(frozen=True)
class Diagnosis:
    """Why, and what to change."""

    slug: str | None
    explanation: str
    fix: str


Rule: TypeAlias = "Callable[[Evidence], Diagnosis | None]"


def domain(names: AbstractSet[str], slug: str, test: Callable[[Evidence], bool], explanation: str, fix: str) -> Rule:
    """A rule for ops of some names, written in place or not."""

    def rule(evidence: Evidence) -> Diagnosis | None:
        return Diagnosis(slug, explanation, fix) if evidence.plain_name in names and test(evidence) else None

    return rule


def is_zero(value: Any) -> bool:
    """Whether an operand is a number and 0."""
    return isinstance(value, (int, float, complex)) and value == 0


def operand(place: int, test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    """Whether the operand at a place is a number that passes a test."""

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
    return operand(-1, lambda value: value == 0)(evidence)


def _is_zero_times_infinity(evidence: Evidence) -> bool:
    op = evidence.forward or evidence.op
    values = [*evidence.operands(), *(value for value in (op.args if op is not None else ()) if isinstance(value, (int, float)))]
    return any(is_zero(value) for value in values) and any(isinstance(value, float) and math.isinf(value) for value in values)


def _argument_of_log(test: Callable[[float], bool]) -> Callable[[Evidence], bool]:
    """Of ``log1p(x)`` it is 1 + x, of ``xlogy(x, y)`` y."""

    def ask(evidence: Evidence) -> bool:
        more = 1.0 if evidence.plain_name == "log1p" else 0.0
        return operand(-1, lambda value: test(value + more))(evidence)

    return ask


_LOG_ZERO = domain(
    LOGS,
    "log_zero",
    lambda one: one.plain_name != "log1p" and (any(is_zero(value) for value in one.operands()) or _argument_of_log(is_zero)(one)),
    "the logarithm of 0 is -inf",
    "clamp the argument to a small positive number, or use `log_softmax` or `BCEWithLogitsLoss`, which stay finite",
)
_LOG1P_ZERO = domain(
    {"log1p"},
    "log_zero",
    lambda one: _argument_of_log(is_zero)(one) or not one.operands(),
    "the logarithm of 1 + x is -inf where x is -1",
    "clamp the argument to slightly above -1",
)
_LOG_NEGATIVE = domain(
    LOGS - {"special_entr"},
    "log_negative",
    _argument_of_log(lambda value: value < 0),
    "the logarithm of a negative number is NaN",
    "make the argument positive (`clamp`, `softplus`), and check why it is negative",
)
_DIV_ZERO = domain(
    DIVISIONS,
    "div_zero",
    _div_by_zero,
    "division by 0",
    "clamp the denominator to a small positive number, or replace it where it is 0",
)
_ROOT_OF_SUM_ZERO = domain(
    {"hypot"},
    "sqrt_zero",
    lambda one: all(map(is_zero, one.operands())),
    "the derivative of a square root at 0 is infinite",
    "use `torch.linalg.vector_norm`, whose derivative at 0 is 0, or clamp the argument of the root to a small positive number",
)
_ROOT_ZERO = domain(
    {"sqrt"},
    "sqrt_zero",
    operand(0, is_zero),
    "the derivative of a square root at 0 is infinite",
    "clamp the argument of the root to a small positive number; for a distance use `torch.linalg.vector_norm`, whose derivative at 0 is 0",
)
_INVERSE_ROOT_ZERO = domain(
    {"rsqrt"},
    "sqrt_zero",
    operand(0, is_zero),
    "1 over the square root of 0 is infinite",
    "clamp the argument of the root to a small positive number",
)
_ROOT_NEGATIVE = domain(
    ROOTS,
    "sqrt_negative",
    operand(0, lambda value: value < 0),
    "the square root of a negative number is NaN",
    "clamp the argument of the root, and check why it is negative (a difference of squares loses digits)",
)
_POW_ZERO = domain(
    POWERS,
    "pow_zero",
    operand(0, lambda value: value == 0),
    "this power of 0 is infinite, or its derivative is",
    "clamp the base to a small positive number",
)
_CTC = domain(
    {"_ctc_loss", "ctc_loss", "_cudnn_ctc_loss"},
    "infeasible_ctc",
    lambda _: True,
    "a target is too long for its input (repeated labels need a blank between them), so no alignment exists",
    "use `zero_infinity=True`, or drop samples whose input is too short",
)
_EMPTY_MEAN = domain(
    MEANS,
    "empty_mean",
    lambda one: (tensor := one.inputs_at(0)) is not None and tensor.numel() == 0,
    "the mean of an empty tensor is 0 / 0",
    "skip the batch when the selection is empty, or divide a sum by `max(count, 1)`",
)


def _has_a_zero_row(evidence: Evidence) -> bool:
    weight, op = evidence.inputs_at(0), evidence.forward or evidence.op
    if weight is None or op is None:
        return False
    kept = op.args[2] if len(op.args) > 2 and isinstance(op.args[2], int) else 0  # noqa: PLR2004 - the third argument is the dimension
    return bool((weight.movedim(kept, 0).reshape(weight.shape[kept], -1) == 0).all(1).any())


_WEIGHT_NORM = domain(
    {"_weight_norm_interface", "_weight_norm"},
    "zero_norm",
    _has_a_zero_row,
    "a row of the weight is all zeros, and weight_norm divides it by its norm: 0 / 0",
    "initialize that row with small random numbers: under weight_norm, a zero weight needs a zero magnitude (`original0`, `weight_g`)",
)
_ZERO_TIMES_INFINITY = domain(
    {"mul"},
    "zero_times_inf",
    _is_zero_times_infinity,
    "0 times inf is NaN: multiplying by 0 does not remove inf",
    "select instead of multiplying (`torch.where`, `masked_fill`), or use a finite number such as -1e9",
)


def _no_slope_at_zero(evidence: Evidence) -> Diagnosis | None:
    """Any function of two or more numbers, such as the angle of a point, whose derivative has no limit where all of them are 0."""
    values = evidence.operands()
    if not evidence.is_derivative or len(values) < 2 or not all(map(is_zero, values)):  # noqa: PLR2004 - as said
        return None
    return Diagnosis(
        "no_slope_at_zero",
        f"`{evidence.name}` has no derivative where all its inputs are 0",
        f"pass `{evidence.name}` a small number instead of 0",
    )


OPERAND_CAUSES: tuple[Rule, ...] = (
    _CTC,
    _WEIGHT_NORM,
    _EMPTY_MEAN,
    _LOG_ZERO,
    _LOG1P_ZERO,
    _LOG_NEGATIVE,
    _ROOT_NEGATIVE,
    _ROOT_OF_SUM_ZERO,
    _ROOT_ZERO,
    _INVERSE_ROOT_ZERO,
    _POW_ZERO,
    _DIV_ZERO,
    _ZERO_TIMES_INFINITY,
    _no_slope_at_zero,
)
"""In the order they are tried."""
