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

_EDGE = "the argument lies at or beyond the edge of where this function, or its derivative, is finite"


def _pole(names: frozenset[str], fix: str, explanation: str = _EDGE) -> Rule:
    return domain(names, "pole", lambda _: True, explanation, fix)


_POLES = (
    _pole(BETWEEN_ONES, "clamp the argument to a little inside of -1 and 1"),
    _pole(BETWEEN_ZERO_AND_ONE, "clamp the argument to a little inside of 0 and 1, or keep the logits that it was made from"),
    _pole(frozenset({"acosh"}), "clamp the argument to a little above 1"),
    _pole(POLES, "keep the argument above 0, where its poles are not", "the argument lies at a pole of this function"),
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
        "the derivative of a power with respect to its exponent holds the logarithm of the base, which is negative here",
        "keep the base positive, or give the exponent as a number that is not trained",
    )


_POW_NEGATIVE = domain(
    POWERS,
    "pow_negative",
    lambda one: bool(one.birth.kind & NAN) and operand(0, lambda value: value < 0)(one) and not _is_whole(_exponent(one)),
    "a fractional power of a negative number is NaN",
    "take the power of a number that is not negative (`abs`, `clamp`), and look at what made it so",
)
_EXP = domain(
    EXPONENTIALS,
    "exp_overflow",
    lambda one: one.birth.kind == INF or one.name == "linalg_matrix_exp",
    "the exponential left the range of its type",
    "bound the argument from above; where this is a softmax, a logsumexp or a softplus, let torch's own function do it",
)
_EQUAL_VALUES = domain(
    EIGENVECTORS,
    "degenerate_matrix",
    lambda one: one.is_derivative,
    "two eigenvalues (or singular values) are equal, and the derivative of their vectors divides by the difference",
    "use the values alone (`eigvalsh`, `svdvals`), or make them differ by small numbers on the diagonal",
)
_SINGULAR = domain(
    FACTORISATIONS,
    "degenerate_matrix",
    lambda _: True,
    "the matrix is singular: it has no inverse, and its determinant is 0",
    "add a small number to the diagonal",
)

DOMAIN_CAUSES: tuple[Rule, ...] = (_slope_by_exponent, _POW_NEGATIVE, _EXP, *_POLES, _EQUAL_VALUES, _SINGULAR)
"""In the order they are tried."""
