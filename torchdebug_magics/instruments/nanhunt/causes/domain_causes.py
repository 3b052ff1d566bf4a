"""Causes that a function's domain tells: its argument lies where the function, or its derivative, is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchdebug_magics.instruments.nanhunt.causes.op_families import (
    BETWEEN_ONES,
    BETWEEN_ZERO_AND_ONE,
    EIGENVECTORS,
    EXPONENTIALS,
    FACTORISATIONS,
    POLES,
    POWERS,
)
from torchdebug_magics.instruments.nanhunt.causes.operand_causes import Diagnosis, Rule, domain, operand
from torchdebug_magics.probing.tensors import INF, NAN

if TYPE_CHECKING:
    from torchdebug_magics.instruments.nanhunt.causes.evidence import Evidence

__all__ = ["DOMAIN_CAUSES"]

_EDGE = "the argument is outside the range in which this function and its derivative are finite, or at its edge"


def _pole(names: frozenset[str], fix: str, explanation: str = _EDGE) -> Rule:
    return domain(names, "pole", lambda _: True, explanation, fix)


_POLES = (
    _pole(BETWEEN_ONES, "clamp the argument to slightly inside (-1, 1)"),
    _pole(BETWEEN_ZERO_AND_ONE, "clamp the argument to slightly inside (0, 1), or keep the logits that it was computed from"),
    _pole(frozenset({"acosh"}), "clamp the argument to slightly above 1"),
    _pole(POLES, "keep the argument above 0, where this function has no poles", "the argument is at a pole of this function"),
)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value == int(value)


def _exponent(evidence: Evidence) -> Any:
    op, values = evidence.forward or evidence.op, evidence.operands()
    given = op.args[1] if op is not None and len(op.args) > 1 else None
    return values[1] if len(values) > 1 else None if isinstance(given, torch.Tensor) else given


def _slope_by_exponent(evidence: Evidence) -> Diagnosis | None:
    """A negative number to a whole power is fine; how it changes with the exponent is not."""
    if evidence.plain_name not in POWERS or not evidence.is_derivative or not operand(0, lambda value: value < 0)(evidence):
        return None
    if not _is_whole(_exponent(evidence)):
        return None
    return Diagnosis(
        "pow_negative",
        "the derivative of a power with respect to its exponent contains the logarithm of the base, which is negative here",
        "keep the base positive, or pass the exponent as a Python number that is not trained",
    )


_POW_NEGATIVE = domain(
    POWERS,
    "pow_negative",
    lambda one: bool(one.birth.kind & NAN) and operand(0, lambda value: value < 0)(one) and not _is_whole(_exponent(one)),
    "a fractional power of a negative number is NaN",
    "make the base nonnegative (`abs`, `clamp`), and check why it is negative",
)
_EXP = domain(
    EXPONENTIALS,
    "exp_overflow",
    lambda one: one.birth.kind == INF or one.name == "linalg_matrix_exp",
    "the exponential overflowed the range of its dtype",
    "bound the argument from above; for a softmax, logsumexp or softplus, call the PyTorch function of that name",
)
_EQUAL_VALUES = domain(
    EIGENVECTORS,
    "degenerate_matrix",
    lambda one: one.is_derivative,
    "two eigenvalues (or singular values) are equal, and the derivative of their vectors divides by their difference",
    "use the values alone (`eigvalsh`, `svdvals`), or add small distinct numbers to the diagonal",
)
_SINGULAR = domain(
    FACTORISATIONS,
    "degenerate_matrix",
    lambda _: True,
    "the matrix is singular: its determinant is 0, so it has no inverse",
    "add a small number to the diagonal",
)

DOMAIN_CAUSES: tuple[Rule, ...] = (_slope_by_exponent, _POW_NEGATIVE, _EXP, *_POLES, _EQUAL_VALUES, _SINGULAR)
"""In the order they are tried."""
